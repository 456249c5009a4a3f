"""Anthropic's messages, in both directions: a request to the messages of a chat, and an answer as the object ``message``, whole or in events."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from tandem.serving.errors import ApiError, anthropic_error, invalid
from tandem.serving.forms.answer import Answer
from tandem.serving.protocol import MAX_TOOLS, Body, Positive, ShortText
from tandem.text.answer_events import CallArguments, CallBegun, Content, Event, Reasoning

Blocks = str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class AnthropicMessage(Body):
    role: str
    content: Blocks


class MessagesBody(Body):
    not_supported = ("mcp_servers", "container")

    model: str | None = None
    max_tokens: Positive | None = None
    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True, min_length=1)]
    system: Blocks | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: Annotated[list[ShortText], Field(fail_fast=True, max_length=128)] | None = None
    stream: bool | None = None

    def check(self) -> None:
        """Raises ``ApiError`` for a tool that only Anthropic's servers have."""
        super().check()
        for tool in self.tools or []:
            if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
                raise invalid("a tool without 'name' and 'input_schema' is one of Anthropic's servers, which this server has not", "tools")

    def chat(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns the messages and the tools as chat completions have them. Raises ``ApiError`` for a block that is neither text nor a tool's."""
        system = _text(self.system or "")
        messages = [{"role": "system", "content": system}] if system else []
        for message in self.messages:
            messages += _chat_messages(message.role, message.content)
        tools = [] if (self.tool_choice or {}).get("type") == "none" else self.tools or []
        functions = [{"name": tool["name"], "description": str(tool.get("description", "")), "parameters": tool["input_schema"]} for tool in tools]
        return messages, [{"type": "function", "function": function} for function in functions]


def _chat_messages(role: str, content: str | Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields a message's results of tools, each of which a chat has as a message of its own, and then the rest."""
    blocks: Sequence[Mapping[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    rest, thoughts = [], []
    for block in blocks:
        if block.get("type") == "tool_result":
            result = block.get("content") or ""
            if not isinstance(result, str) and not (isinstance(result, list) and all(isinstance(part, Mapping) for part in result)):
                raise invalid("the content of a tool_result is neither a text nor a list of blocks", "messages")
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": _text(result)}
        elif block.get("type") == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif block.get("type") != "redacted_thinking":
            rest.append(block)
    calls = [block for block in rest if block.get("type") == "tool_use"]
    text = _text([block for block in rest if block.get("type") != "tool_use"])
    reasoning = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    if calls:
        used = [(str(each.get("id", "")), {"name": str(each.get("name")), "arguments": each.get("input") or {}}) for each in calls]
        yield {"role": role, "content": text, **reasoning, "tool_calls": [{"id": id, "type": "function", "function": function} for id, function in used]}
    elif rest:
        yield {"role": role, "content": text, **reasoning}


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    wrong = next((block for block in content if not isinstance(block.get("text"), str)), None)
    if wrong is not None:
        raise invalid(f"a block of type {str(wrong.get('type'))[:40]!r} is not read; only text and tools are", "messages")
    return "\n".join(block["text"] for block in content)


class MessageWriter:
    """Writes an answer as the object ``message`` ``id`` and as the events of its stream."""

    def __init__(self, id: str, model: str) -> None:
        self._head = {"id": id, "type": "message", "role": "assistant", "model": model}
        self._content: list[dict[str, Any]] = []
        self._parts: list[str] = []
        """Of the text or the input of the last block, while it is open."""
        self._is_open = False
        self.whole: dict[str, Any] = {}
        """The object, once the answer has ended."""

    def begin(self, prompt: int) -> Iterator[dict[str, Any]]:
        """Yields the first event. ``prompt``: the number of its tokens."""
        usage = {"input_tokens": prompt, "output_tokens": 0}
        yield {"type": "message_start", "message": {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}}

    def take(self, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
        """Yields the events of the stream for ``events`` of the answer."""
        for event in events:
            match event:
                case Reasoning(text):
                    yield from self._written({"type": "thinking", "thinking": "", "signature": ""}, {"type": "thinking_delta", "thinking": text}, text)
                case Content(text):
                    yield from self._written({"type": "text", "text": ""}, {"type": "text_delta", "text": text}, text)
                case CallBegun(name, id):
                    yield from self._close()
                    yield from self._open({"type": "tool_use", "id": id, "name": name, "input": {}})
                case CallArguments(text):
                    yield from self._written({"type": "tool_use"}, {"type": "input_json_delta", "partial_json": text}, text)

    def finish(self, answer: Answer) -> Iterator[dict[str, Any]]:
        """Yields the last events, and makes ``whole``."""
        if not self._content:
            yield from self._open({"type": "text", "text": ""})
        yield from self._close()
        is_cut = answer.finish_reason == "length"
        reason = "max_tokens" if is_cut else "tool_use" if answer.calls else "stop_sequence" if answer.stop_text else "end_turn"
        ended = {"stop_reason": reason, "stop_sequence": answer.stop_text}
        self.whole = {**self._head, "content": self._content, **ended, "usage": {"input_tokens": answer.prompt, "output_tokens": answer.completion}}
        yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": answer.completion}}
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Returns the event of an error after the first event."""
        return anthropic_error(error)

    def _written(self, block: dict[str, Any], delta: dict[str, Any], text: str) -> Iterator[dict[str, Any]]:
        if not self._is_open or self._content[-1]["type"] != block["type"]:
            yield from self._close()
            yield from self._open(block)
        self._parts.append(text)
        yield {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _open(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._content.append(block)
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": block}

    def _close(self) -> Iterator[dict[str, Any]]:
        if not self._is_open:
            return
        text, block = "".join(self._parts), self._content[-1]
        self._is_open = False
        self._parts.clear()
        name = {"thinking": "thinking", "text": "text", "tool_use": "input"}[block["type"]]
        self._content[-1] = {**block, name: _input(text) if name == "input" else text}
        yield {"type": "content_block_stop", "index": len(self._content) - 1}


def _input(text: str) -> Any:
    """Returns the value of the JSON ``text``, an empty object for a call that was cut."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
