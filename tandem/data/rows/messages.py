"""Conversations of a row: messages with role and content, as OpenAI's API and chat templates have them, and tools."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function", "ipython", "environment")
"""Roles of the chat templates of known models."""

Message = Mapping[str, Any]


class BadMessages(ValueError):
    """Raised for messages that cannot be read; the message says why in one line."""


def read_messages(value: Any, key: str) -> tuple[Message, ...]:
    """Returns the messages under ``key``, without the null values with which tables fill the keys that a message lacks, and with content that is a list
    of text parts joined. Raises ``BadMessages``."""
    if not isinstance(value, list) or not value:
        raise BadMessages(f"'{key}' is not a list of messages")
    return tuple(_message(message, number) for number, message in enumerate(value, start=1))


def read_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Returns tools as JSON schemas; tables hold them as JSON text. Raises ``BadMessages``."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            raise BadMessages("'tools' is a text that is not JSON") from None
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadMessages("'tools' is not a list of tools (JSON schemas)")
    return tuple(_without_nulls(tool) for tool in value)


def is_messages(value: Any) -> bool:
    """Returns whether ``value`` is a list of objects, which ``read_messages`` may accept."""
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def as_text(messages: Sequence[Message]) -> str:
    """Returns roles and contents as JSON text: what decides the split of a conversation."""
    return json.dumps([[message["role"], message.get("content")] for message in messages], ensure_ascii=False)


def _message(message: Any, number: int) -> Message:
    if isinstance(message, dict) and "from" in message and "value" in message:
        raise BadMessages(f"message {number} has 'from' and 'value', as ShareGPT has; rename them to 'role' (user, assistant) and 'content'")
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadMessages(f"message {number} needs a 'role' that is a text")
    message = _without_nulls(message)
    role, calls, content = message["role"], message.get("tool_calls"), _joined(message.get("content"), number)
    if role not in ROLES:
        raise BadMessages(f"message {number} has the role '{role}'; a role is one of {', '.join(ROLES[:5])}")
    if calls is not None and not (role == ASSISTANT and isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise BadMessages(f"message {number} has 'tool_calls' that are not a list of calls by the assistant")
    if not isinstance(content, str) and not (calls and content is None):
        raise BadMessages(f"message {number} needs a 'content' that is a text")
    return {**message, "content": content} if "content" in message else message


def _joined(content: Any, number: int) -> Any:
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise BadMessages(f"message {number} needs a 'content' that is a text, and has a part of type {kind!r}; only text is read")
    return "".join(part["text"] for part in content)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
