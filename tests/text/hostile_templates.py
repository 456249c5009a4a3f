"""Chat templates that would take memory or time without end, by what they do: values that hold themselves twice, texts that become long lists, many values at
once, and what Python does in C and nothing interrupts. A child process with little memory renders them."""

_DOUBLED = "{% set ns = namespace(x='ab', y='ab') %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
_TUPLES = "{% set ns = namespace(x=('ab',)) %}{% for a in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
_LONG = "{% set u = '你' * 2**24 %}"
_ONE_HASH = "range(0, 99999 * 2305843009213693951, 2305843009213693951)"
"""Numbers of one hash: a set of them takes the square of their number."""

TOO_LARGE = {
    "nested output": _DOUBLED + "{{ ns.x }}",
    "nested ~": _DOUBLED + "{{ ns.x ~ 'a' }}",
    "nested string": _DOUBLED + "{{ ns.x | string }}",
    "nested upper": _DOUBLED + "{{ ns.x | upper }}",
    "nested tojson": _DOUBLED + "{{ ns.x | tojson }}",
    "nested safe": _DOUBLED + "{{ ns.x | safe }}",
    "nested pprint": _DOUBLED + "{{ ns.x | pprint }}",
    "nested %": _DOUBLED + "{{ '%s' % [ns.x] }}",
    "nested format": _DOUBLED + "{{ '{}'.format(ns.x) }}",
    "nested format r": _DOUBLED + "{{ '{!r}'.format(ns.x) }}",
    "nested join": _DOUBLED + "{{ [ns.x] | join }}",
    "nested replace": _DOUBLED + "{{ 'a' | replace('a', ns.x) }}",
    "nested xmlattr": _DOUBLED + "{{ {'a': ns.x} | xmlattr }}",
    "nested raise": _DOUBLED + "{{ raise_exception(ns.x) }}",
    "nested ==": _DOUBLED + "{{ ns.x == ns.y }}",
    "nested is eq": _DOUBLED + "{{ ns.x is eq(ns.y) }}",
    "nested in": _DOUBLED + "{{ ns.x in [ns.y] }}",
    "nested <": _DOUBLED + "{{ ns.x < ns.y }}",
    "nested index": _DOUBLED + "{{ [ns.y].index(ns.x) }}",
    "nested count": _DOUBLED + "{{ [ns.y].count(ns.x) }}",
    "nested sort": _DOUBLED + "{{ [ns.y, ns.x] | sort | length }}",
    "nested max": _DOUBLED + "{{ [ns.y, ns.x] | max | length }}",
    "nested changed": _DOUBLED + "{% for a in [ns.x, ns.y] %}{{ loop.changed(a) }}{% endfor %}",
    "hash dict": _TUPLES + "{{ {ns.x: 1} | length }}",
    "hash unique": _TUPLES + "{{ [ns.x] | unique | list | length }}",
    "hash get": _TUPLES + "{{ {1: 1}.get(ns.x) }}",
    "hash item": _TUPLES + "{{ {1: 1}[ns.x] }}",
    "deep hash": "{% set ns = namespace(x=()) %}{% for a in range(20000) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} | length }}",
    "deep generator": "{% set ns = namespace(x=[1]) %}{% for a in range(99999) %}{% set ns.x = ns.x | map('string') %}{% endfor %}{{ ns.x | first }}",
    "deep generator dropped": "{% set ns = namespace(x=[1]) %}{% for a in range(99999) %}{% set ns.x = ns.x | map('string') %}{% endfor %}{% set ns.x = 1 %}x",
    "namespaces": "{% set ns = namespace(x=1) %}{% for a in range(60) %}{% set m = namespace(a=ns.x, b=ns.x) %}{% set ns.x = m %}{% endfor %}{{ ns.x }}",
    "dicts": "{% set ns = namespace(x=1) %}{% for a in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}",
    "dict items": "{% set ns = namespace(x=1) %}{% for a in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x}.values() %}{% endfor %}{{ ns.x }}",
    "list + list": "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "list * n": "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}{% set ns.x = ns.x * 10 %}{% endfor %}",
    "sum lists": "{% set x = [[1] * 9999] * 9999 %}{{ x | sum(start=[]) | length }}",
    "sum tuples": "{% set x = [(1,) * 9999] * 9999 %}{{ x | sum(start=()) | length }}",
    "sum of lists twice": "{% set ns = namespace(x=[1, 2]) %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] | sum(start=[]) %}{% endfor %}",
    "many texts": _LONG + "{% set ns = namespace(l=[]) %}{% for a in range(9999) %}{% set ns.l = ns.l + [u.replace('你', '我')] %}{% endfor %}",
    "recursion with texts": "{% macro m(n) %}{% set x = ('你' * 2**24) ~ n %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "output of texts": _LONG + "{% for a in range(9999) %}{{ u ~ a }}{% endfor %}",
    "block of texts": _LONG + "{% set y %}{% for a in range(9999) %}{{ u ~ a }}{% endfor %}{% endset %}",
    "characters": _LONG + "{{ u | list | length }}",
    "characters sorted": _LONG + "{{ u | sort | length }}",
    "words": "{{ ('你你 ' * 2**22).split() | length }}",
    "words rsplit": "{{ ('你你 ' * 2**22).split(' ') | length }}",
    "lines": "{{ ('你你\\n' * 2**22).splitlines() | length }}",
    "wordcount": "{{ ('你你 ' * 2**22) | wordcount }}",
    "title": "{{ ('你你 ' * 2**22) | title | length }}",
    "urlencode": _LONG + "{{ u | urlencode | length }}",
    "striptags": "{{ ('<>' * 2**22) | striptags }}",
    "urlize": "{{ ('http://a.bc ' * 2**20) | urlize | length }}",
    "punycode": "{{ (range(9999) | map('string') | join('é你') * 20).encode('punycode') | length }}",
    "idna": "{{ ('é' * 2**22).encode('idna') | length }}",
    "namereplace": _LONG + "{{ u.encode('ascii', 'namereplace') | length }}",
    "round": "{{ 5 | round(-99999999) }}",
    "round ceil": "{{ 5 | round(99999999, 'ceil') }}",
    "int 16": "{% set b = ('f' * 2**24) | int(base=16) %}{{ b // (b - 1) }}",
    "from_bytes": "{% set b = (5).from_bytes(('f' * 2**22).encode(), 'big') %}{% set c = (5).from_bytes(('f' * 2**21).encode(), 'big') %}{{ b // c % 7 }}",
    "json indent": "{% set ns = namespace(x=[1]*999) %}{% for a in range(90) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson(indent=4096) | length }}",
    "json separators": "{{ ([1]*9999) | tojson(separators=('a'*99999, ':')) | length }}",
    "sort equal texts": "{% set a = 'a' * 2**24 %}{% set b = a ~ '' %}{{ ([a ~ '1', b ~ '1'] * 2**15) | sort | length }}",
    "count equal texts": "{% set a = 'a' * 2**23 %}{{ ([a ~ '1'] * 2**19).count(a ~ '1') }}",
    "translate list": "{% set x = 'a' * 9999 %}{{ ('\\0' * 9999).translate([x]) | length }}",
    "percent": "{{ ('%%' * 2**23) % () | length }}",
    "join characters": _LONG + "{{ ''.join(u) | length }}",
    "self block": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "translate text table": "{% set x = 'a' * 9999 %}{{ ('\\0' * 9999).translate({0: x}) | length }}",
    "constant growth": "{{ 'aaaaaaaa'" + "|replace('a', 'aaaaaaaa')" * 30 + "}}",
    "autoescape": "{% autoescape true %}{% set x = '<' * 2**23 %}{% set ns = namespace(l=[]) %}"
    "{% for a in range(999) %}{% set ns.l = ns.l + [(x|e) ~ a] %}{% endfor %}{% endautoescape %}",
}  # fmt: skip
"""One value becomes too large."""

GROW = {
    "many lists": "{% set ns = namespace(l=[]) %}{% for a in range(99999) %}{% set ns.l = [ns.l, range(9999) | list] %}{% endfor %}",
    "many slices": "{% set x = [1] * 2**20 %}{% set ns = namespace(l=[]) %}{% for a in range(99999) %}{% set ns.l = [ns.l, x[1:], x[2:], x[3:]] %}{% endfor %}",
}  # fmt: skip
"""Many values do, together."""

ENDLESS = {
    "collide unique": f"{{{{ {_ONE_HASH} | unique | list | length }}}}",
    "collide fromkeys": f"{{{{ {{}}.fromkeys({_ONE_HASH}) | length }}}}",
    "collide union": f"{{{{ ({{1: 1}}.keys() - []).union({_ONE_HASH}) | length }}}}",
    "attribute path": "{{ ['x'] | map(attribute='a.' * 2**22, default='x') | list }}",
    "wide format text": "{{ ('{}' * 2**19).format(*([1] * 2**19)) | length }}",
    "block chain": "".join("{% block a" + str(i) + " %}" + 2 * ("{{ self.a" + str(i + 1) + "() }}") + "{% endblock %}" for i in range(60))
    + "{% block a60 %}{% endblock %}",
    "cycler": "{% set c = cycler(*range(99999)) %}{% for a in range(99999) %}{% for b in range(99999) %}{{ c.next() }}{% endfor %}{% endfor %}",
}  # fmt: skip
"""Something takes too long."""
