"""Chat templates that compute without end are refused, those that end have the text of jinja2's own sandbox, and tools that a template does not show are
noticed."""

import contextlib
import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.text import rendering_limits
from tandem.text.chat import ChatTemplate, apply_chat_template
from tandem.types import EndlessTemplate, UserError

ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over texts": "{% set x = 'a' * 99999 %}{% for a in x %}{% for b in x %}{% for c in x %}{% endfor %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a recursive loop": "{% for a in [1, 1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}{% endfor %}",
    "filters of filters": "{% for a in range(99999) %}{{ range(9999) | map('string') | map('upper') | list | length }}{% endfor %}",
    "a call block": "{% macro m() %}{{ caller() }}{% endmacro %}{% for a in range(99999) %}{% for b in range(99999) %}{% call m() %}{% endcall %}"
    "{% endfor %}{% endfor %}",
}  # fmt: skip
NESTED = "{% set ns = namespace(x='ab') %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
TOO_LARGE = {
    "a power of powers": "{{ 9 ** (9 ** 9) }}",
    "a product": "{% set ns = namespace(x=2) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "a repeated text": "{{ 'ab' * 10 ** 9 }}",
    "a repeated list": "{{ 10 ** 9 * [1, 2] }}",
    "a text joined to itself": "{% set ns = namespace(x='abcdefgh') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "a text added to itself": "{% set ns = namespace(x='abcdefgh') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a list added to itself": "{% set ns = namespace(x=[1]) %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a list of a list, written": NESTED + "{{ ns.x }}",
    "a list of a list as JSON": NESTED + "{{ ns.x | tojson }}",
    "a list of a list, compared": NESTED + "{{ ns.x == [ns.x, 1] }}",
    "a list of a list in a refusal": NESTED + "{{ raise_exception(ns.x) }}",
    "a sum of lists": "{{ ([[1] * 9999] * 9999) | sum(start=[]) }}",
    "a rounded number": "{{ 5 | round(-99999999) }}",
    "a text as a list": "{{ ('你' * 2**22) | list }}",
    "a block of itself": "{% set ns = namespace(x='abcdefgh') %}{% for a in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    "{% endfor %}",
    "a wide number": "{{ '%99999999d' % 1 }}",
    "a precise number": "{{ '%.99999999f' % 1.5 }}",
    "a width that is given": "{{ '%*d' % (99999999, 1) }}",
    "a text by its name, often": "{% set x = 'a' * 99999 %}{{ ('%(x)s' * 9999) % {'x': x} }}",
    "a wide number of a filter": "{{ '%99999999d' | format(1) }}",
    "a wide field": "{{ '{:99999999}'.format(1) }}",
    "a field of a given width": "{{ '{:{}{}}'.format(1, 9999, 9999) }}",
    "a field, often": "{% set x = 'a' * 99999 %}{{ ('{x}' * 9999).format_map({'x': x}) }}",
    "a centred text": "{{ 'x'.center(99999999) }}",
    "a centred text of a filter": "{{ 'x' | center(width=99999999) }}",
    "a text at the left": "{{ 'x'.ljust(99999999) }}",
    "bytes": "{{ (5).to_bytes(99999999, 'big') | length }}",
    "tabs": "{{ ('\\t' * 99999).expandtabs(4000) }}",
    "an indentation": "{{ 'x' | indent(99999999, true) }}",
    "an indentation of lines": "{{ ('x\n' * 99999) | indent('a' * 9999) }}",
    "a replaced letter": "{% set x = 'a' * 9999 %}{{ x.replace('a', x) }}",
    "a replaced letter of a filter": "{% set x = 'a' * 9999 %}{{ x | replace('a', x) }}",
    "letters by a table": "{% set x = 'a' * 9999 %}{{ x.translate({97: x}) }}",
    "a long separator": "{% set x = 'a' * 9999 %}{{ x.join(x) }}",
    "a long separator of a filter": "{% set x = 'a' * 9999 %}{{ x | join(x) }}",
    "a text joined often": "{% set x = {'a': 'a' * 99999} %}{{ ([x] * 9999) | join(attribute='a') }}",
    "wrapped words": "{% set x = 'a ' * 9999 %}{{ x | wordwrap(1, wrapstring=x) }}",
}  # fmt: skip
ENDS = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.revindex }}{{ loop.previtem is defined }}{{ m.content }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.length }}{{ loop.nextitem is defined }}{% else %}none{% endfor %}",
    "{% for x in nothing %}{{ x }}{% else %}none{% endfor %}{{ nothing ~ 1 ~ [2] ~ none }}",
    "{% for key, value in messages[0].items() %}{{ key ~ '=' ~ value }}{% endfor %}{{ messages[0].content + '!' }}{{ '=' * 7 }}{{ 2 ** 10 }}{{ 3 * 4.5 }}",
    "{{ messages | map(attribute='content') | join(',') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{% for a in [[1, [2]], 3] recursive %}{{ a if a is number else loop(a) }}{% endfor %}{{ 'x' | indent(4, true) }}{{ '%s-%d' | format('a', 3) }}",
    "{{ '%5.2f|%-4s|%%' % (1.5, 'b') }}{{ '%(a)s' % {'a': 1} }}{{ '{:>6}{x[0]}'.format('a', x='bc') }}{{ '{a}'.format_map({'a': 1}) }}",
    "{{ 7 % 4 }}{{ 'a'.center(5) }}{{ 'b' | center(5) }}{{ 'aab'.replace('a', 'cc', 1) }}{{ 'aab' | replace('a', 'cc') }}{{ 5 | replace(5, 6) }}",
    "{{ ', '.join(['a', 'b']) }}{{ messages | join('; ', attribute='role') }}{{ {'a': 1} | join }}{{ range(3) | join('-') }}{{ 'a\nb' | indent(2) }}",
    "{{ [1, 2] + [3] }}{{ [[1], [2]] | sum(start=[]) }}{{ [1.5, 2] | sum }}{{ {(1, 2): 3}[(1, 2)] }}",
    "{{ [[1, 2], [3]] == [[1, 2], [3]] }}{{ messages[1:] | length }}{{ 'abc'[::-1] }}{{ ['a', 'B', 'A'] | unique | list }}{{ 7.25 | round(1) }}",
    "{% set ns = namespace(x=[]) %}{% for m in messages %}{% set ns.x = ns.x + [m.role] %}{% endfor %}{{ ns.x }}{{ ns }}{{ 'a b'.split() }}{{ messages }}",
    "{{ '\ta'.expandtabs(2) }}{{ 'aab'.translate({97: 'x'}) }}{{ 'a b c' | wordwrap(3) }}{{ [1, 2, 3] | batch(2, 0) | list }}{{ [1, 2, 3] | slice(2) | list }}",
]
MESSAGES = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "你好"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """``write(template)`` returns a folder with it."""

    def folder(template: str) -> Path:
        (tmp_path / "tokenizer_config.json").write_text("{}")
        (tmp_path / "chat_template.jinja").write_text(template)
        return tmp_path

    return folder


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_refused_in_one_line_and_the_next_text_has_all_of_the_time(
    name: str, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering_limits, "MOST_SECONDS", 0.2)
    template = ChatTemplate.from_folder(write(ENDLESS[name]))
    for _ in range(2):
        began = time.thread_time()
        with pytest.raises(UserError) as refused:
            template.render(MESSAGES)
        assert str(refused.value).endswith("refuses these messages: it takes more than 0.2 seconds of processor time, as one that loops without end")
        assert 0.2 <= time.thread_time() - began < 5.0 and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", TOO_LARGE)
def test_texts_and_numbers_that_grow_without_end_are_refused_before_they_are_made(name: str, write: Callable[[str], Path]) -> None:
    folder = write(TOO_LARGE[name])
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"the chat template of '.*' refuses these messages: .*(makes? too large a value|makes a text of more than)"):
            ChatTemplate.from_folder(folder).render(MESSAGES)
        # Reading a file takes 64 MiB, and a refused text has at least 100 MB; one that is doubled is made up to its bound.
        assert tracemalloc.get_traced_memory()[1] < (2**28 if "itself" in name else 8e7)
    finally:
        tracemalloc.stop()


def test_a_template_longer_than_those_of_models_is_refused_unread_and_a_long_refusal_is_cut(write: Callable[[str], Path]) -> None:
    with pytest.raises(UserError, match=r"has 300,000 characters; at most 262,144 are read: save the tokenizer again, or shorten it$"):
        ChatTemplate.from_folder(write("a" * 300_000))
    with pytest.raises(UserError, match=r"refuses these messages: a{1000}\.\.\.$"):
        ChatTemplate.from_folder(write("{{ raise_exception('a' * 2**20) }}")).render(MESSAGES)


@pytest.mark.parametrize("source", ENDS)
def test_a_template_that_ends_has_the_text_of_the_sandbox_of_jinja2(source: str, write: Callable[[str], Path]) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert ChatTemplate.from_folder(write(source)).render(MESSAGES) == plain.from_string(source).render(messages=MESSAGES)


SHOWS = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
IGNORES = "{% for m in messages %}{{ m.content }}{% endfor %}"
REFUSES_NONE = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}" + IGNORES


OF_SYSTEM = "{% if messages[0].role == 'system' %}{{ tools | tojson }}{% endif %}" + IGNORES
WITHOUT_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
OF_MANY = "{% if messages | length > 1 %}{{ tools | tojson }}{% endif %}x"
OF_ONE = "{% if messages | length == 1 %}{{ tools | tojson }}{% endif %}x"
REFUSES_ALL = "{{ raise_exception('these messages are not those of a game') }}"
OF_VARIABLE = "{% if game %}{{ tools | tojson }}{% endif %}" + IGNORES


@pytest.mark.parametrize(
    ("source", "ignores"),
    [
        (SHOWS, False), (IGNORES, True), (REFUSES_NONE, False), (OF_SYSTEM, False), (WITHOUT_SYSTEM + IGNORES, True), (WITHOUT_SYSTEM + SHOWS, False),
        (OF_MANY, False), (OF_ONE, False), (REFUSES_ALL, False),
    ],
)  # fmt: skip
def test_a_template_is_judged_by_its_tools_whatever_was_rendered_before(source: str, ignores: bool, write: Callable[[str], Path]) -> None:
    for before in ([], [MESSAGES[:1]], [MESSAGES], [MESSAGES, MESSAGES[:1]]):
        template = ChatTemplate.from_folder(write(source), with_tools=True)
        for messages in before:
            with contextlib.suppress(UserError):
                template.render(messages, tools=TOOLS)
                template.check_tools(TOOLS)
        assert template.ignores_tools(TOOLS) is ignores
        assert template.ignores_tools(TOOLS) is ignores and not template.ignores_tools([])


def test_other_tools_and_variables_are_judged_for_themselves_and_a_template_without_end_is_not_taken_for_one_that_reads_tools(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate.from_folder(write(OF_VARIABLE), with_tools=True)
    for _ in range(2):
        assert template.ignores_tools(TOOLS) and not template.ignores_tools(TOOLS, game=True)
    of_two = ChatTemplate.from_folder(write("{% if tools and tools | length > 1 %}{{ tools | tojson }}{% endif %}x"), with_tools=True)
    for _ in range(2):
        assert of_two.ignores_tools(TOOLS) and not of_two.ignores_tools(TOOLS * 2)
    monkeypatch.setattr(rendering_limits, "MOST_SECONDS", 0.2)
    endless = ChatTemplate.from_folder(write("{% if not tools %}" + ENDLESS["loops in loops"] + "{% endif %}x"), with_tools=True)
    with pytest.raises(EndlessTemplate):
        endless.ignores_tools(TOOLS)


def test_a_template_of_its_own_for_tools_is_asked_and_not_the_other(tmp_path: Path) -> None:
    for of_tools, ignores in ((SHOWS, False), (IGNORES, True)):
        named = [{"name": "default", "template": IGNORES + "."}, {"name": "tool_use", "template": of_tools}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        template = ChatTemplate.from_folder(tmp_path, with_tools=True)
        assert template.ignores_tools(TOOLS) is ignores


def test_a_text_in_python_warns_of_tools_that_the_model_does_not_see(write: Callable[[str], Path], recwarn: pytest.WarningsRecorder) -> None:
    apply_chat_template(write(SHOWS), MESSAGES, tools=TOOLS)
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"writes the same text with the tool and without, so that the model does not see them"):
        apply_chat_template(write(IGNORES), MESSAGES, tools=TOOLS)
