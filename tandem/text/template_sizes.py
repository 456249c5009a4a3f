"""How large the texts become that operators, methods and filters of chat templates make, told before they are made."""

import re
from collections.abc import Mapping, Sequence, Sized
from typing import Any

MOST_CHARACTERS = 2**26
"""Of a string, and of the elements of a list: more than the text of any context has."""
MOST_BITS = 2**16
"""Of a whole number."""
MOST_WIDTH = 2**12
"""Of what pads: a column, an indentation, the digits of a number."""
_CONVERSION = re.compile(r"%(\([^)]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?.", re.DOTALL)
_DIGITS = re.compile(r"\d+")
_PADDED = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "indent", "wordwrap", "batch", "slice", "tojson"})
"""What is given a width, and no other number."""


def is_too_large(operator: str, left: Any, right: Any) -> bool:
    """Returns whether ``left operator right`` has more than ``MOST_BITS`` bits or ``MOST_CHARACTERS`` elements."""
    if operator == "%":
        return isinstance(left, str | bytes) and _is_large_format(left, right)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
        return bits > MOST_BITS
    if operator == "+":
        return isinstance(left, Sized) and isinstance(right, Sized) and len(left) + len(right) > MOST_CHARACTERS
    repeated, times = (left, right) if isinstance(left, Sized) else (right, left)
    return isinstance(repeated, Sized) and isinstance(times, int) and len(repeated) * times > MOST_CHARACTERS


def is_too_large_result(name: str, text: Any, given: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Returns whether the method or filter ``name`` of ``text`` with these arguments pads by more than ``MOST_WIDTH`` or makes more than
    ``MOST_CHARACTERS``: of those whose result can be many times as long as what they are given, but for ``join`` and ``str.format``."""
    arguments = [*given, *named.values()]
    if name in _PADDED and any(isinstance(value, int) and value > MOST_WIDTH for value in arguments):
        return True
    if not isinstance(text, str | bytes):
        return False
    longest = max(map(_length, arguments), default=0)
    width = max([longest, *(value for value in arguments if isinstance(value, int))])
    if name == "replace":
        return _replaced(text, given, named) > MOST_CHARACTERS
    if name == "translate":
        longest = max((_length(value) for table in arguments if isinstance(table, Mapping) for value in table.values()), default=0)
        return len(text) * max(longest, 1) > MOST_CHARACTERS
    if name == "indent":
        return len(text) + len(text.splitlines()) * width > MOST_CHARACTERS
    if name == "expandtabs":
        return isinstance(text, str) and len(text) + text.count("\t") * width > MOST_CHARACTERS
    # Of a text of short lines each word is followed by what wraps it.
    return name == "wordwrap" and len(text) * max(longest, 1) > MOST_CHARACTERS


def is_too_large_join(separator: Any, items: Sequence[Any]) -> bool:
    """Returns whether the ``items`` with ``separator`` between them have more than ``MOST_CHARACTERS``."""
    return sum(map(_length, items)) + _length(separator) * len(items) > MOST_CHARACTERS


def is_wide(layout: str) -> bool:
    """Returns whether the ``layout`` of one field of a format has a width or a precision of more than ``MOST_WIDTH``."""
    return any(len(digits) > 9 or int(digits) > MOST_WIDTH for digits in _DIGITS.findall(layout))


def _is_large_format(text: str | bytes, values: Any) -> bool:
    """Returns whether ``text % values`` has too wide a column, or more than ``MOST_CHARACTERS``."""
    layout = text if isinstance(text, str) else text.decode("latin-1")
    every = list(values.values()) if isinstance(values, Mapping) else list(values) if isinstance(values, tuple) else [values]
    lengths = [_length(value) for value in every]
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


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes) else 0
