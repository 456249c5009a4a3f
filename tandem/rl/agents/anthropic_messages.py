"""Anthropic's messages as agents call them, in both directions: a request to the messages of a chat, and the answer, whole or as a stream of events."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from tandem.rl.agents.model_calls import ModelCall
from tandem.rl.agents.session import Asked, Session
from tandem.serving.errors import ApiError, invalid
from tandem.serving.protocol import Body, Positive, ShortText

Blocks = str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class AnthropicMessage(Body):
    role: str
    content: Blocks


class MessagesRequest(Body):
    """``temperature``, ``top_p`` and ``top_k`` are not read, as in ``AgentChatRequest``; neither is ``thinking``, which the model's template decides."""

    not_supported = ("mcp_servers", "container")

    model: str | None = None
    max_tokens: Positive | None = None
    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True, min_length=1)]
    system: Blocks | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: Annotated[list[ShortText], Field(fail_fast=True, max_length=128)] | None = None
    stream: bool | None = None

    def check(self) -> None:
        """Raises ``ApiError`` for a field that asks for what an episode cannot have."""
        super().check()
        if self.tool_choice is not None and self.tool_choice.get("type") not in ("auto", "none"):
            raise invalid("'tool_choice.type' must be auto or none: an episode's tokens are drawn freely", "tool_choice")
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
        functions = [{"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]} for tool in tools]
        return messages, [{"type": "function", "function": function} for function in functions]

    def ask(self, session: Session) -> Asked:
        """Returns the request to the model of ``session``. Raises ``ApiError``, ``UserError``, ``TooLong`` and ``SessionEnded``."""
        return session.ask(*self.chat(), self.max_tokens, self.stop_sequences or [])


def _chat_messages(role: str, content: str | Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields a message's results of tools, each of which a chat has as a message of its own, and then the rest."""
    blocks: Sequence[Mapping[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    rest = []
    for block in blocks:
        if block.get("type") == "tool_result":
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": _text(block.get("content") or "")}
        elif block.get("type") not in ("thinking", "redacted_thinking"):
            rest.append(block)
    calls = [block for block in rest if block.get("type") == "tool_use"]
    text = _text([block for block in rest if block.get("type") != "tool_use"])
    if calls:
        used = [(str(each.get("id", "")), {"name": str(each.get("name")), "arguments": each.get("input") or {}}) for each in calls]
        yield {"role": role, "content": text, "tool_calls": [{"id": id, "type": "function", "function": function} for id, function in used]}
    elif rest:
        yield {"role": role, "content": text}


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    wrong = next((block for block in content if not isinstance(block.get("text"), str)), None)
    if wrong is not None:
        raise invalid(f"a block of type {str(wrong.get('type'))[:40]!r} is not read; only text and tools are", "messages")
    return "\n".join(block["text"] for block in content)


def message_object(call: ModelCall, id: str, model: str) -> dict[str, Any]:
    """Returns the object ``message`` with the answer of ``call``."""
    content = [{"type": "text", "text": call.answer["content"]}] if call.answer["content"] or not call.tool_calls else []
    for each in call.answer.get("tool_calls", ()):
        content.append({"type": "tool_use", "id": each["id"], "name": each["function"]["name"], "input": each["function"]["arguments"]})
    reason = "tool_use" if call.tool_calls else "max_tokens" if call.finish_reason == "length" else "stop_sequence" if call.stop_text else "end_turn"
    return {
        "id": id, "type": "message", "role": "assistant", "model": model, "content": content, "stop_reason": reason, "stop_sequence": call.stop_text,
        "usage": {"input_tokens": len(call.prompt), "output_tokens": len(call.token_ids)},
    }  # fmt: skip


def message_events(call: ModelCall, id: str, model: str) -> Iterator[dict[str, Any]]:
    """Yields the events of a stream with the answer of ``call``, which is complete when they are sent."""
    whole = message_object(call, id, model)
    usage = {**whole["usage"], "output_tokens": 0}
    yield {"type": "message_start", "message": {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}}
    for index, block in enumerate(whole["content"]):
        is_text = block["type"] == "text"
        delta = {"type": "text_delta", "text": block["text"]} if is_text else {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": {**block, "text": ""} if is_text else {**block, "input": {}}}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": whole["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}


def error_object(error: ApiError) -> dict[str, Any]:
    """Returns ``error`` in the form of this interface."""
    return {"type": "error", "error": {"type": error.kind, "message": error.message}}
