"""The messages of conversations in one form, so that what an agent sends back can be compared with what it was sent."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.types import UserError

Message = Mapping[str, Any]


def plain_message(message: Message, number: int) -> dict[str, Any]:
    """Returns message ``number`` of a chat request with its content as one text, the arguments of its calls as values, and without keys that no template
    reads. Raises ``UserError`` for what is no text."""
    role = str(message.get("role", ""))
    plain: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": plain_text(message.get("content"), number) or ""}
    calls = message.get("tool_calls")
    if calls:
        plain["tool_calls"] = plain_calls(calls, number)
    for name in ("tool_call_id", "name"):
        if message.get(name) is not None:
            plain[name] = str(message[name])
    return plain


def without_ids(message: Message) -> Message:
    """Returns ``message`` as an agent may send it back: some give the calls names of their own."""
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [call["function"] for call in message["tool_calls"]]}


def plain_text(content: Any, number: int) -> str | None:
    """Returns the content of message ``number`` as one text, ``None`` as it is. Raises ``UserError`` for a part that is no text."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise UserError(f"messages[{number}].content is neither a text nor a list of parts")
    parts = []
    for part in content:
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise UserError(f"messages[{number}] has a part that is no text; only text is read")
        parts.append(text)
    return "\n".join(parts)


def plain_calls(calls: Any, number: int) -> list[dict[str, Any]]:
    """Returns the ``tool_calls`` of message ``number`` with their arguments as values. Raises ``UserError`` for what is no call."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise UserError(f"messages[{number}].tool_calls is not a list")
    return [_call(call, number) for call in calls]


def _call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"messages[{number}] has a call without 'function.name'")
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise UserError(f"messages[{number}] has a call of '{function['name']}' whose arguments are not JSON") from None
    return {"id": str(call.get("id", "")), "type": "function", "function": {"name": function["name"], "arguments": arguments}}
