"""The tool calls in what a model wrote, in the formats of vLLM's tool parsers."""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.config.multi_turn import ToolCallParser

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_MISTRAL_START = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\][\w-]+)?\[ARGS\]")
_LLAMA_START = "<|python_tag|>"
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


def parse_tool_calls(parser: ToolCallParser, text: str) -> list[ToolCall]:
    """Returns the calls in ``text``, the turn as the model wrote it, special tokens included. A call that is begun and cannot be read has a ``problem``; an
    empty list is an answer without calls."""
    return list(_PARSERS[parser](text))


def content_before_calls(parser: ToolCallParser, text: str) -> str:
    """Returns the text of the turn ``text`` before its first call."""
    start = {"hermes": "<tool_call>", "mistral": _MISTRAL_START}.get(parser)
    return text.partition(start)[0].strip() if start is not None else ""


def _hermes(text: str) -> Iterator[ToolCall]:
    for match in _HERMES.finditer(text):
        yield _from_json(match[1])


def _mistral(text: str) -> Iterator[ToolCall]:
    _, start, calls = text.partition(_MISTRAL_START)
    if not start:
        return
    named = list(_MISTRAL_NAMED.finditer(calls))
    ends = [*(following.start() for following in named[1:]), len(calls)]
    for match, end in zip(named, ends, strict=False):
        yield _from_json(calls[match.end() : end].removesuffix(_MISTRAL_START), match[1])
    if not named:
        yield from _json_list(calls)


def _llama3_json(text: str) -> Iterator[ToolCall]:
    text = text.strip().removeprefix(_LLAMA_START).strip()
    if not text.startswith("{"):
        return
    decoder = json.JSONDecoder()
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError) as error:
            yield ToolCall(problem=f"the call is not JSON: {error}")
            return
        yield _call(value)
        text = text[end:].lstrip(" \n;")


def _pythonic(text: str) -> Iterator[ToolCall]:
    text = text.strip().removeprefix(_LLAMA_START).strip()
    if not text.startswith("["):
        return
    try:
        parsed = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        yield ToolCall(problem="the calls are not a list in Python's syntax, such as [name(key=value)]")
        return
    if not isinstance(parsed, ast.List) or not parsed.elts or not all(isinstance(call, ast.Call) for call in parsed.elts):
        return
    for call in parsed.elts:
        assert isinstance(call, ast.Call)
        yield _python_call(call)


def _python_call(call: ast.Call) -> ToolCall:
    name = _dotted(call.func)
    if not name or call.args or any(keyword.arg is None for keyword in call.keywords):
        return ToolCall(name, problem="arguments need their names: name(key=value)")
    try:
        return _plain_call(name, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords})
    except (ValueError, TypeError, RecursionError, MemoryError):
        return ToolCall(name, problem="an argument is not a plain value")


def _dotted(node: ast.expr) -> str:
    """Returns the name ``a.b.c``, empty for another expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts, node = [node.attr, *parts], node.value
    return ".".join([node.id, *parts]) if isinstance(node, ast.Name) else ""


def _json_list(text: str) -> Iterator[ToolCall]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        yield ToolCall(problem=f"the calls are not JSON: {error}")
        return
    for value in values if isinstance(values, list) else [values]:
        yield _call(value)


def _from_json(text: str, name: str = "") -> ToolCall:
    """Returns the call in the JSON ``text``: the whole call, or the arguments of ``name``."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(name, problem=f"the call is not JSON: {error}")
    return _call({"name": name, "arguments": value} if name else value)


def _call(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall(problem="a call is an object with 'name' and 'arguments'")
    name, arguments = value["name"], value.get("arguments", value.get("parameters", {}))
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


_PARSERS: dict[ToolCallParser, Callable[[str], Iterator[ToolCall]]] = {
    "hermes": _hermes, "llama3_json": _llama3_json, "mistral": _mistral, "pythonic": _pythonic
}
