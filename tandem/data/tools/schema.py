"""The JSON schema of a tool from its signature and docstring, in the form that chat templates read: that of transformers' ``get_json_schema``."""

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from tandem.types import UserError

_PLAIN: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"}, float: {"type": "number"}, str: {"type": "string"}, bool: {"type": "boolean"}, list: {"type": "array"},
    dict: {"type": "object"}, type(None): {"type": "null"}, Any: {},
}  # fmt: skip
_SECTION = re.compile(r"^\s*(Args|Arguments|Returns?|Raises|Yields|Example|Examples|Note|Notes):\s*$")
_PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "string": (str,), "boolean": (bool,), "array": (list,), "object": (dict,), "null": (type(None),)
}


def tool_schema(function: Callable[..., Any], path: str) -> dict[str, Any]:
    """Returns the schema of ``function``, which a recipe names as ``path``. Raises ``UserError`` for a parameter without a type or a description, as
    transformers does: the model knows a tool by nothing else."""
    try:
        hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters
    except (TypeError, ValueError, NameError) as error:
        raise UserError(f"tool '{path}': its signature cannot be read: {error}") from None
    description, described = _docstring(inspect.getdoc(function) or "")
    if not description:
        raise UserError(f"tool '{path}' has no docstring; its first lines say to the model what the tool does")
    properties: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UserError(f"tool '{path}' has the parameter '{parameter}'; a model calls tools with named arguments only")
        if name not in hints:
            raise UserError(f"tool '{path}': parameter '{name}' has no type; write for example {name}: str")
        if name not in described:
            raise UserError(f"tool '{path}': parameter '{name}' is not described; add a section 'Args:' with '{name}: ...' to its docstring")
        properties[name] = {**_type_schema(hints[name], path, name), "description": described[name]}
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    schema: dict[str, Any] = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    return {"type": "function", "function": {"name": function.__name__, "description": description, "parameters": schema}}


def check_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Returns what is wrong with ``arguments`` for the tool of ``schema``, in words for the model; empty if nothing is."""
    parameters = schema["function"]["parameters"]
    properties, name = parameters["properties"], schema["function"]["name"]
    for key in arguments:
        if key not in properties:
            return f"{name} has no argument '{key}'; it has {', '.join(properties) or 'none'}"
    for key in parameters.get("required", ()):
        if key not in arguments:
            return f"{name} needs the argument '{key}'"
    for key, value in arguments.items():
        if not _fits(value, properties[key]):
            return f"the argument '{key}' of {name} must be {_kind_of(properties[key])}"
    return ""


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if value is None and schema.get("nullable"):
        return True
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "anyOf" in schema:
        return any(_fits(value, each) for each in schema["anyOf"])
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not kinds:
        return True
    if not any(isinstance(value, _PYTHON_TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool)) for kind in kinds):
        return False
    items = schema.get("items")
    return all(_fits(each, items) for each in value) if items and isinstance(value, list) else True


def _kind_of(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(map(repr, schema["enum"]))
    kinds = schema.get("type", "any")
    return f"of type {kinds if isinstance(kinds, str) else ' or '.join(kinds)}"


def _type_schema(hint: Any, path: str, name: str) -> dict[str, Any]:
    if hint in _PLAIN:
        return dict(_PLAIN[hint])
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [_type_schema(each, path, name) for each in inner if each is not type(None)]
        if len(kinds) == 1:
            schema = kinds[0]
        elif all(set(kind) == {"type"} and isinstance(kind["type"], str) for kind in kinds):
            schema = {"type": sorted(kind["type"] for kind in kinds)}
        else:
            schema = {"anyOf": kinds}
        return schema | ({"nullable": True} if type(None) in inner else {})
    if origin is typing.Literal and all(isinstance(value, str | int | float | bool) for value in inner):
        kinds = sorted({_PLAIN[type(value)]["type"] for value in inner})
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": _type_schema(inner[0], path, name)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(inner[1], path, name)}
    raise UserError(f"tool '{path}': parameter '{name}' has the type {hint}; use str, int, float, bool, list, dict, Literal or None with |")


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Returns the description and that of each argument of a docstring in Google's style."""
    description: list[str] = []
    arguments: dict[str, str] = {}
    section, current, depth = "", "", None
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            section = heading[1]
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments") and line.strip():
            indent = len(line) - len(line.lstrip())
            depth = indent if depth is None else depth
            entry = re.match(r"\s*(\w+)(?:\s*\(.*?\))?:\s*(.*)", line)
            if entry and indent <= depth:
                current = entry[1]
                arguments[current] = entry[2].strip()
            elif current:
                arguments[current] = f"{arguments[current]} {line.strip()}".strip()
    return "\n".join(description).strip(), arguments
