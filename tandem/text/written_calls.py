"""A tool call as a model wrote it, read strictly: its name and arguments, or what is wrong with it."""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_ID = re.compile(r"[A-Za-z0-9]{9}")
"""The form of an identifier that templates accept."""
_DEPTH = 50


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call. ``arguments``: JSON values. ``problem``: what is wrong with the way it is written, empty if nothing is. ``id``: the model's own, if it
    wrote one of nine letters or digits."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    id: str = ""


def from_python(text: str) -> ToolCall:
    """Returns the call in ``text``, an expression of Python: ``name(key=value)``."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        call = None
    if not isinstance(call, ast.Call):
        return ToolCall(problem="the calls are not a list in Python's syntax, such as [name(key=value)]")
    return _python_call(call)


def _python_call(call: ast.Call) -> ToolCall:
    name = _dotted(call.func)
    if not name or call.args or any(keyword.arg is None for keyword in call.keywords):
        return ToolCall(name, problem="arguments need their names: name(key=value)")
    try:
        return _plain_call(name, {str(keyword.arg): ast.literal_eval(_JsonNames().visit(keyword.value)) for keyword in call.keywords})
    except (ValueError, TypeError, RecursionError, MemoryError):
        return ToolCall(name, problem="an argument is not a plain value")


class _JsonNames(ast.NodeTransformer):
    """Replaces JSON's names of constants, which models write in calls of Python too."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        constants = {"true": True, "false": False, "null": None}
        return ast.Constant(constants[node.id]) if node.id in constants else node


def _dotted(node: ast.expr) -> str:
    """Returns the name ``a.b.c``, empty for another expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts, node = [node.attr, *parts], node.value
    return ".".join([node.id, *parts]) if isinstance(node, ast.Name) else ""


def from_json(text: str, name: str = "") -> ToolCall:
    """Returns the call in the JSON ``text``: the whole call, or the arguments of ``name``."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(name, problem=f"the call is not JSON: {error}")
    return _call({"name": name, "arguments": value} if name else value)


def _call(value: Any) -> ToolCall:
    name = value.get("name", value.get("tool_name")) if isinstance(value, dict) else None
    if not isinstance(name, str):
        return ToolCall(problem="a call is an object with 'name' and 'arguments'")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(name, problem="the arguments are not an object")
    own = value.get("id")
    return _plain_call(name, arguments, own if isinstance(own, str) and _ID.fullmatch(own) else "")


def _plain_call(name: str, arguments: Mapping[str, Any], own_id: str = "") -> ToolCall:
    """Returns the call with its arguments as the JSON values that the tool and the journal have."""
    wrapped: Any = arguments
    for _ in range(_DEPTH):
        wrapped = [wrapped]
    try:
        # Inside of other values, as records hold them: what is too deep is found here.
        text = json.dumps(wrapped, allow_nan=False)
        return ToolCall(name, json.loads(text[_DEPTH:-_DEPTH]), id=own_id)
    except (ValueError, TypeError, RecursionError):
        return ToolCall(name, problem="an argument is not a JSON value")
