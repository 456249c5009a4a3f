"""Rows of JSON files: one object per line, or one array of objects."""

import json
import math
from collections.abc import Iterator
from typing import Any, NoReturn

from tandem.data.rows.row import Row, kind_of
from tandem.text.surrogates import has_lone_surrogate


def json_lines(content: bytes, name: str) -> Iterator[Row]:
    """Yields a row for each line of ``content``. An empty last line is none."""
    # Only a line feed ends a line: JSON may contain U+2028 and similar characters, at which str.splitlines would split.
    lines = content.split(b"\n")
    if lines[-1].strip() == b"":
        lines.pop()
    for number, line in enumerate(lines, 1):
        yield _line(line, f"{name}:{number}", is_first=number == 1)


def json_array(content: bytes, name: str) -> Iterator[Row]:
    """Yields a row for each object of the array in ``content``; stops after what is not JSON."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        yield Row(f"{name}:{line}", None, "not UTF-8; save the file as UTF-8")
        return
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
    at, line, counted = _skip(text, text.index("[") + 1), 1, 0
    while at < len(text) and text[at] != "]":
        line, counted = line + text.count("\n", counted, at), at
        where = f"{name}:{line}"
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            yield Row(f"{name}:{error.lineno}", None, f"not valid JSON: {error.msg} at column {error.colno}")
            return
        except (ValueError, RecursionError) as error:
            yield Row(where, None, f"not valid JSON: {error}")
            return
        yield _checked(value, text[at:end], where, "an entry of the array")
        at = _skip(text, end)
        if at < len(text) and text[at] == ",":
            at = _skip(text, at + 1)
        elif at < len(text) and text[at] != "]":
            yield Row(f"{name}:{line + text.count(chr(10), counted, at)}", None, "not valid JSON: a comma or ] is missing after an entry of the array")
            return
    if at >= len(text):
        yield Row(f"{name}:{text.count(chr(10)) + 1}", None, "not valid JSON: the array has no end; the file is cut off")
    elif text[at + 1 :].strip():
        yield Row(name, None, "not valid JSON: there is text after the array")


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _line(line: bytes, where: str, is_first: bool) -> Row:
    try:
        text = line.decode("utf-8-sig" if is_first else "utf-8").strip()
    except UnicodeDecodeError as error:
        return Row(where, None, f"not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8")
    if not text:
        return Row(where, None, "the line is empty; remove it")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        return Row(where, None, f"not valid JSON: {error.msg} at column {error.colno}{_other_format(text) if is_first else ''}")
    except (ValueError, RecursionError) as error:
        return Row(where, None, f"not valid JSON: {error}")
    return _checked(value, text, where, "a line")


def _other_format(text: str) -> str:
    if text in ("[", "{"):
        return f"; one JSON object per line is expected: name a file with {'an array' if text == '[' else 'objects'} of many lines FILE.json"
    if text.count(",") and not text.startswith(("{", "[")):
        return "; if it is a table with commas, name it FILE.csv"
    return ""


def _checked(value: Any, text: str, where: str, what: str) -> Row:
    if not isinstance(value, dict):
        return Row(where, None, f"{what} is a JSON object, this is {kind_of(value)}")
    if has_lone_surrogate(text, value):
        return Row(where, None, "a text contains half of a surrogate pair, which is not a character; correct the text")
    return Row(where, value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row:
            raise ValueError(f"key '{key}' is given twice")
        row[key] = value
    return row


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:40]} is more than a number can be")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
