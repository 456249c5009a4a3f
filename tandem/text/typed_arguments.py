"""Arguments that a model wrote as text between marks, as the values that the tool's JSON schema asks for."""

import json
from collections.abc import Mapping
from typing import Any

_PYTHON = {"True": True, "False": False, "None": None}
_KINDS: Mapping[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "object": (dict,), "array": (list,), "null": (type(None),)
}  # fmt: skip


def typed_argument(text: str, schema: Any) -> Any:
    """Returns the value of ``text``, without the line breaks that surround it: text where the ``schema`` of the argument allows a string or is unknown,
    unless it allows another type in whose JSON it is written; and text that is none of the schema's types."""
    text = text.removeprefix("\n").removesuffix("\n")
    types = _types(schema)
    kinds = tuple(kind for name in types for kind in _KINDS.get(name, ()))
    if not kinds:
        return text
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        if text.strip() not in _PYTHON:
            return text
        value = _PYTHON[text.strip()]
    if isinstance(value, bool) and bool not in kinds:
        return text
    return value if isinstance(value, kinds) else text


def _types(schema: Any) -> list[str]:
    """Returns the types that ``schema`` allows, none where it does not say."""
    if not isinstance(schema, Mapping):
        return []
    given = schema.get("type")
    named = [given] if isinstance(given, str) else [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            named += [each for part in schema[name] for each in _types(part)]
    return named


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")
