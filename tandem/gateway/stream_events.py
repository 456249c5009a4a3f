"""What the events of a stream of OpenAI's API contain: its choices, their texts and what has an entry for each token."""

import json
from typing import Any

_DONE = b"[DONE]"
_DELTA_TEXTS = ("content", "reasoning", "reasoning_content")
_CALL_TEXTS = ("name", "arguments")


class Diverged(Exception):
    """A stream is not what the client has received, or no such stream at all."""


def bodies(events: bytes) -> tuple[list[dict[str, Any]], bool]:
    """Returns the JSON objects of whole events, and whether ``[DONE]`` is among them. Raises ``Diverged`` for an event that is no object of choices."""
    found = [line[5:].strip() for line in events.splitlines() if line.startswith(b"data:")]
    try:
        bodies = [json.loads(data) for data in found if data != _DONE]
    except ValueError:
        raise Diverged("an event of the stream is not JSON") from None
    for body in bodies:
        choices = body.get("choices", []) if isinstance(body, dict) else None
        if not isinstance(choices, list) or not all(isinstance(choice, dict) and isinstance(choice.get("index"), int) for choice in choices):
            raise Diverged("an event of the stream has no choices")
    return bodies, _DONE in found


def is_usage(body: dict[str, Any]) -> bool:
    return not body.get("choices") and body.get("usage") is not None


def texts(choice: dict[str, Any]) -> dict[str, str]:
    """Returns the texts of a choice by name: ``text`` or those of its delta, and for tool call N ``N.name`` and ``N.arguments``."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return {"text": choice["text"]} if isinstance(choice.get("text"), str) else {}
    texts = {name: delta[name] for name in _DELTA_TEXTS if isinstance(delta.get(name), str)}
    for call, function in _calls(delta):
        texts |= {f"{call.get('index')}.{name}": function[name] for name in _CALL_TEXTS if isinstance(function.get(name), str)}
    return texts


def with_texts(choice: dict[str, Any], texts: dict[str, str]) -> dict[str, Any]:
    """Returns ``choice`` with what of its ``texts`` is new. A call whose name the client has, has its id too, which another server draws anew."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return choice | {"text": texts.get("text", "")}
    new = delta | {name: texts[name] for name in _DELTA_TEXTS if isinstance(delta.get(name), str)}
    if "tool_calls" in delta:
        new["tool_calls"] = [each for call, function in _calls(delta) if (each := _new_call(call, function, texts)) is not None]
        if not new["tool_calls"]:
            del new["tool_calls"]
    return choice | {"delta": new}


def _new_call(call: dict[str, Any], function: dict[str, Any], texts: dict[str, str]) -> dict[str, Any] | None:
    index = call.get("index")
    arguments = {"arguments": texts[f"{index}.arguments"]} if isinstance(function.get("arguments"), str) else {}
    if texts.get(f"{index}.name"):
        return call | {"function": function | arguments}
    return {"index": index, "function": arguments} if arguments.get("arguments") else None


def _calls(delta: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns the tool calls of a delta, each with its function."""
    found = delta.get("tool_calls")
    calls = [call for call in found if isinstance(call, dict)] if isinstance(found, list) else []
    return [(call, call["function"]) for call in calls if isinstance(call.get("function"), dict)]


def lists(choice: dict[str, Any]) -> dict[str, list[Any]]:
    """Returns the lists of a choice that have an entry for each token, by name."""
    logprobs = choice.get("logprobs")
    inside = {f"logprobs.{name}": values for name, values in logprobs.items() if isinstance(values, list)} if isinstance(logprobs, dict) else {}
    return inside | ({"token_ids": choice["token_ids"]} if isinstance(choice.get("token_ids"), list) else {})


def set_list(choice: dict[str, Any], name: str, values: list[Any]) -> None:
    if name == "token_ids":
        choice["token_ids"] = values
    else:
        choice["logprobs"] = choice["logprobs"] | {name.removeprefix("logprobs."): values}
