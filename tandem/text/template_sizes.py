"""How large the texts and lists become that operators, methods and filters of chat templates make, told before they are made."""

import re
from collections.abc import Iterable, Mapping, Sequence, Set, Sized, ValuesView
from itertools import chain
from typing import Any

MOST_CHARACTERS = 2**24
"""Of a string, and of a value that is written, compared or hashed, with all that it holds: more than the text of any context has."""
MOST_ITEMS = 2**20
"""Of a list, and characters of a text that is read piece by piece."""
MOST_BITS = 2**16
"""Of a whole number."""
MOST_WIDTH = 2**12
"""Of what pads: a column, an indentation, the digits of a number."""
MOST_DEPTH = 200
"""Of lists in lists: Python compares and hashes them in C, where deeper ones end the process."""
_CONVERSION = re.compile(r"%(\([^)]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?.", re.DOTALL)
_DIGITS = re.compile(r"\d+")
_PADDED = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "indent", "wordwrap", "batch", "slice", "tojson", "round"}
)
"""What is given a width, and no other number."""
_LISTED = frozenset({"list", "sort", "groupby", "slice", "join", "unique", "min", "max", "dictsort"})
"""What makes a list of all items."""
_SHALLOW = frozenset(
    {"length", "count", "list", "map", "select", "reject", "selectattr", "rejectattr", "items", "batch", "slice", "first", "last", "default", "d", "reverse"}
    | {"random", "attr", "sum"}
)
"""Filters that neither write, compare nor hash what they are given."""
_READ_IN_PIECES = frozenset({"title", "wordcount", "wordwrap", "urlize", "urlencode", "striptags", "xmlattr", "format", "format_map"})
"""What reads a text in Python, or with expressions that make a list of its pieces."""
_SPACES = tuple(chr(number) for number in range(0x3001) if chr(number).isspace())
_LINE_ENDS = ("\n", "\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")
_MOST_OF_A_CHARACTER = 96
"""What the handler ``namereplace`` writes for one."""


def is_too_large(operator: str, left: Any, right: Any) -> bool:
    """Returns whether ``left operator right`` has more than ``MOST_BITS`` bits, ``MOST_CHARACTERS`` characters or ``MOST_ITEMS`` items."""
    if operator == "%":
        return isinstance(left, str | bytes) and is_large_format(left, right)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
        return bits > MOST_BITS
    if operator == "+":
        return isinstance(left, Sized) and isinstance(right, Sized) and len(left) + len(right) > _most(left)
    repeated, times = (left, right) if isinstance(left, Sized) else (right, left)
    return operator == "*" and isinstance(repeated, Sized) and isinstance(times, int) and len(repeated) * times > _most(repeated)


def is_large_value(*values: Any) -> bool:
    """Returns whether ``values`` have together more than ``MOST_CHARACTERS`` as text, or one is deeper than ``MOST_DEPTH``."""
    return text_size(values) > MOST_CHARACTERS


def text_size(value: Any, indent: int = 0, separator: int = 0) -> int:
    """Returns about how many characters ``value`` has as text, in which a list that is held twice is written twice: at most a little more than
    ``MOST_CHARACTERS``, and so much for what is deeper than ``MOST_DEPTH``. ``indent``: before each line of what a list holds; ``separator``: after it."""
    return len(value) if isinstance(value, str | bytes) else _written(value, indent, separator, {}, 0)[0]


def _written(value: Any, indent: int, separator: int, known: dict[int, tuple[int, int]], depth: int) -> tuple[int, int]:
    """Returns the characters and the lines of ``value``. ``known``: those of what was measured before, by its ``id``."""
    if isinstance(value, str | bytes):
        return len(value) + 2, 1
    if isinstance(value, int):
        return value.bit_length() // 3 + 5, 1
    items = _items(value)
    if items is None:
        return 8, 1
    if id(value) in known:
        return known[id(value)]
    if depth > MOST_DEPTH:
        return MOST_CHARACTERS + 1, 1
    # What holds itself is written as '[...]'.
    known[id(value)] = 5, 1
    size, lines = 2, 2
    for item in items:
        more, more_lines = (len(item) + 2, 1) if type(item) is str else _written(item, indent, separator, known, depth + 1)
        size, lines = size + more + 2 + separator + more_lines * indent, lines + more_lines
        if size > MOST_CHARACTERS:
            break
    known[id(value)] = size, lines
    return size, lines


def _items(value: Any) -> Iterable[Any] | None:
    """Returns what is written of ``value`` in turn; ``None``: it holds nothing."""
    if value is None or isinstance(value, list | tuple):
        return value
    if isinstance(value, dict | Mapping):
        return chain.from_iterable(value.items())
    if isinstance(value, Set | ValuesView):
        return value
    # A namespace of jinja2, which need not be installed, writes its variables.
    return (object.__getattribute__(value, "_Namespace__attrs"),) if type(value).__name__ == "Namespace" and type(value).__module__ == "jinja2.utils" else None


def is_too_large_result(name: str, text: Any, given: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Returns whether the method or filter ``name`` of ``text`` with these arguments pads by more than ``MOST_WIDTH``, or reads or makes more than
    ``MOST_CHARACTERS`` or ``MOST_ITEMS``; for ``join`` and formats see below."""
    arguments = [*given, *named.values()]
    if name in _PADDED and any(isinstance(value, int) and abs(value) > MOST_WIDTH for value in arguments):
        return True
    if name in _LISTED and isinstance(text, Sized) and len(text) > MOST_ITEMS:
        return True
    longest = max(map(_length, arguments), default=0)
    if name == "tojson":
        width = max([longest, *(value for value in arguments if isinstance(value, int))])
        return text_size(text, width, text_size(arguments)) > MOST_CHARACTERS
    if name not in _SHALLOW and is_large_value(text, *arguments):
        return True
    if name in _READ_IN_PIECES and text_size(text) > MOST_ITEMS:
        return True
    if name == "pprint":
        return text_size(text) > MOST_WIDTH
    if not isinstance(text, str | bytes):
        # Whole numbers of text.
        return name == "from_bytes" and longest > MOST_WIDTH
    if name == "int":
        return len(text) > MOST_WIDTH
    return _is_too_large_text(name, text, given, named, longest)


def _is_too_large_text(name: str, text: str | bytes, given: Sequence[Any], named: Mapping[str, Any], longest: int) -> bool:
    arguments = [*given, *named.values()]
    width = max([longest, *(value for value in arguments if isinstance(value, int))])
    if name in ("split", "rsplit", "splitlines"):
        return len(text) > MOST_ITEMS and _pieces(name, text, arguments) > MOST_ITEMS
    if name in ("encode", "decode"):
        # Two codecs take the square of the length, and a handler of errors writes the names of characters.
        is_slow = any(codec in str(value).lower() for value in arguments for codec in ("puny", "idna")) and len(text) > MOST_WIDTH
        return is_slow or ("namereplace" in arguments and len(text) * _MOST_OF_A_CHARACTER > MOST_CHARACTERS)
    if name == "replace":
        return _replaced(text, given, named) > MOST_CHARACTERS
    if name == "translate":
        tables = (table.values() if isinstance(table, Mapping) else table for table in arguments if isinstance(table, Mapping | list | tuple))
        longest = max((_length(value) for table in tables for value in table), default=0)
        return len(text) * max(longest, 1) > MOST_CHARACTERS
    if name == "indent":
        lines = _pieces("splitlines", text, ())
        return lines > MOST_ITEMS or len(text) + lines * width > MOST_CHARACTERS
    if name == "expandtabs":
        return isinstance(text, str) and len(text) + text.count("\t") * width > MOST_CHARACTERS
    # Of a text of short lines each word is followed by what wraps it, and each address by what a link has.
    return name in ("wordwrap", "urlize") and len(text) * max(longest, 1) > MOST_CHARACTERS


def is_too_large_join(separator: Any, items: Iterable[Any]) -> bool:
    """Returns whether the ``items`` with ``separator`` between them have more than ``MOST_CHARACTERS``."""
    if isinstance(items, str | bytes):
        return len(items) > MOST_ITEMS or len(items) * (1 + _length(separator)) > MOST_CHARACTERS
    return text_size(items, separator=_length(separator)) > MOST_CHARACTERS


def is_wide(layout: str) -> bool:
    """Returns whether the ``layout`` of one field of a format has a width or a precision of more than ``MOST_WIDTH``."""
    return any(len(digits) > 9 or int(digits) > MOST_WIDTH for digits in _DIGITS.findall(layout))


def is_large_format(text: str | bytes, values: Any) -> bool:
    """Returns whether ``text % values`` has too wide a column, or more than ``MOST_CHARACTERS``."""
    if len(text) > MOST_ITEMS or is_large_value(values):
        return True
    layout = text if isinstance(text, str) else text.decode("latin-1")
    every = list(values.values()) if isinstance(values, Mapping) else list(values) if isinstance(values, tuple) else [values]
    lengths = [text_size(value) for value in every]
    # Values of a tuple are written once each, and those with names as often as the text says.
    total, again = (len(layout), max(lengths, default=0)) if isinstance(values, Mapping) else (len(layout) + sum(lengths), 0)
    for _, *widths in _CONVERSION.findall(layout):
        if "*" in widths and any(isinstance(value, int) and abs(value) > MOST_WIDTH for value in every):
            return True
        if any(map(is_wide, widths)):
            return True
        total += again + sum(MOST_WIDTH if width == "*" else int(width or 0) for width in widths)
    return total > MOST_CHARACTERS


def _replaced(text: str | bytes, given: Sequence[Any], named: Mapping[str, Any]) -> int:
    """Returns the length of ``text.replace(*given, **named)``; a filter's arguments may be no texts."""
    values = {**dict(zip(("old", "new", "count"), given, strict=False)), **named}
    old, new = (value if isinstance(value, str | bytes) else str(value) for value in (values.get("old", ""), values.get("new", "")))
    if isinstance(text, str) is not isinstance(old, str):
        return 0
    times = text.count(old)  # type: ignore[arg-type]
    most = values.get("count")
    times = min(times, most) if isinstance(most, int) and most >= 0 else times
    return len(text) + times * (len(new) - len(old))


def _pieces(name: str, text: str | bytes, arguments: Iterable[Any]) -> int:
    """Returns the most pieces into which ``name`` divides ``text``."""
    separator = next((value for value in arguments if isinstance(value, str | bytes) and value), None)
    if separator is not None and isinstance(separator, str) is isinstance(text, str):
        return text.count(separator) + 1  # type: ignore[arg-type]
    ends = _LINE_ENDS if name == "splitlines" else _SPACES
    layout = text if isinstance(text, str) else text.decode("latin-1")
    return sum(map(layout.count, ends)) + 1


def _most(value: Sized) -> int:
    return MOST_CHARACTERS if isinstance(value, str | bytes) else MOST_ITEMS


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes) else 0
