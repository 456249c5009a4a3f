"""Examples for supervised fine-tuning, read from lines of JSON: a prompt with its completion, or a conversation."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ASSISTANT = "assistant"


class BrokenExample(Exception):
    """Raised for an example that cannot be trained on; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Example:
    """One example: ``prompt`` and ``completion``, or ``messages`` with ``role`` and ``content``, at least one of them the assistant's,
    which may have ``tool_calls`` instead of content. ``tools``: the tools that the assistant can call, as JSON schemas."""

    prompt: str = ""
    completion: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """The whole text of the example."""
        return "\n".join(message["content"] for message in self.messages if message.get("content")) if self.messages else self.prompt + self.completion

    @property
    def asked(self) -> str:
        """The prompt before the first learned token. It decides the split of an example, so that no question is both trained on and held
        out."""
        if not self.messages:
            return self.prompt
        first = next(i for i, message in enumerate(self.messages) if message["role"] == ASSISTANT)
        return json.dumps([[message["role"], message.get("content")] for message in self.messages[:first]], ensure_ascii=False)


def read_example(row: Any, prompt_key: str, completion_key: str) -> Example:
    """Returns the example in a JSON object. Raises ``BrokenExample``."""
    if not isinstance(row, dict):
        raise BrokenExample("it is not a JSON object")
    if "messages" in row:
        if completion_key in row:
            raise BrokenExample(f"there are both 'messages' and '{completion_key}'; an example must be one of the two")
        return Example(messages=_messages(row["messages"]), tools=_tools(row.get("tools")))
    for key in (prompt_key, completion_key):
        if not isinstance(row.get(key), str):
            raise BrokenExample(f"there is neither 'messages' nor a text under the key '{key}' (it has {', '.join(map(repr, row)) or 'no keys'})")
    if not row[completion_key]:
        raise BrokenExample(f"'{completion_key}' is empty, so there is nothing to learn")
    return Example(row[prompt_key], row[completion_key])


def _messages(messages: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(messages, list) or not messages:
        raise BrokenExample("'messages' is not a list of messages")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BrokenExample(f"message {number} needs a 'role' that is a text")
        is_assistant, calls, content = message["role"] == ASSISTANT, message.get("tool_calls"), message.get("content")
        if calls is not None and not (is_assistant and isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
            raise BrokenExample(f"message {number} has 'tool_calls' that are not a list of calls by the assistant")
        if not isinstance(content, str) and not (calls and content is None):
            raise BrokenExample(f"message {number} needs a 'content' that is a text")
        if is_assistant and not content and not calls:
            raise BrokenExample(f"message {number} is the assistant's and empty, so there is nothing to learn")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise BrokenExample("no message is the assistant's, so there is nothing to learn")
    return tuple(messages)


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BrokenExample("'tools' is not a list of tools (JSON schemas)")
    return tuple(tools)
