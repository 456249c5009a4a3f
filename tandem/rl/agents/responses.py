"""OpenAI's responses as agents call them, in both directions: a request to the messages of a chat, and the answer, whole or as a stream of events."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from tandem.rl.agents.model_calls import ModelCall
from tandem.rl.agents.session import Asked, Session
from tandem.serving.errors import invalid
from tandem.serving.protocol import Body, Positive


class ResponsesRequest(Body):
    """``temperature``, ``top_p`` and ``reasoning`` are not read, as in ``AgentChatRequest``. ``previous_response_id``: of a response of this episode."""

    not_supported = ("background", "conversation", "prompt", "include", "top_logprobs")

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: Any = None
    max_output_tokens: Positive | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = None

    def check(self) -> None:
        """Raises ``ApiError`` for a field that asks for what an episode cannot have."""
        super().check()
        if self.tool_choice not in (None, "auto", "none"):
            raise invalid("'tool_choice' must be auto or none: an episode's tokens are drawn freely", "tool_choice")
        if ((self.text or {}).get("format") or {"type": "text"}).get("type") != "text":
            raise invalid("'text.format' is not supported in an episode, whose tokens are drawn freely; leave it out", "text")
        for tool in self.tools or []:
            if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
                raise invalid(f"a tool of type {str(tool.get('type'))[:40]!r} is not supported; give functions", "tools")

    def ask(self, session: Session) -> Asked:
        """Returns the request to the model of ``session``. Raises ``ApiError``, ``UserError``, ``TooLong`` and ``SessionEnded``."""
        earlier: Sequence[Mapping[str, Any]] = []
        if self.previous_response_id is not None:
            named = session.response(self.previous_response_id)
            if named is None:
                raise invalid("'previous_response_id' names no response of this episode", "previous_response_id")
            earlier = named
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        tools = [] if self.tool_choice == "none" else self.tools or []
        functions = [{"type": "function", "function": {name: tool[name] for name in ("name", "description", "parameters") if name in tool}} for tool in tools]
        return session.ask([*instructions, *earlier, *chat_messages(items)], functions, self.max_output_tokens)

    def conversation(self, call: ModelCall) -> list[Mapping[str, Any]]:
        """Returns the messages that a request continues which names the answer of ``call`` to this request: all but the instructions, which OpenAI does not
        carry over either."""
        return [*call.messages, call.answer][1 if self.instructions else 0 :]


def chat_messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the items of an input as the messages of a chat: what the assistant wrote and the functions that it called after it are one message. Raises
    ``ApiError`` for an item that is none of these."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": str(item.get("role")), "content": _content(item.get("content"))})
        elif kind == "function_call":
            call = {"id": str(item.get("call_id", "")), "type": "function", "function": {"name": item.get("name"), "arguments": item.get("arguments", "")}}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": _content(item.get("output"))})
        elif kind != "reasoning":
            raise invalid(f"an item of type {str(kind)[:40]!r} is not read; messages and functions are", "input")
    return messages


def _content(content: Any) -> Any:
    return content if isinstance(content, str) or content is None else [part for part in content if part.get("type") != "reasoning_text"]


def response_object(call: ModelCall, id: str, model: str, created: int) -> dict[str, Any]:
    """Returns the object ``response`` with the answer of ``call``."""
    is_cut = call.finish_reason == "length"
    output: list[dict[str, Any]] = []
    status = "incomplete" if is_cut else "completed"
    if call.answer["content"] or not call.tool_calls:
        part = {"type": "output_text", "text": call.answer["content"], "annotations": [], "logprobs": []}
        output.append({"type": "message", "id": f"msg_{id}", "status": status, "role": "assistant", "content": [part]})
    for number, each in enumerate(call.answer.get("tool_calls", ())):
        arguments = json.dumps(each["function"]["arguments"], ensure_ascii=False)
        about = {"id": f"fc_{id}_{number}", "call_id": each["id"], "status": status}
        output.append({"type": "function_call", **about, "name": each["function"]["name"], "arguments": arguments})
    read, drawn = len(call.prompt), len(call.token_ids)
    return {
        "id": id, "object": "response", "created_at": created, "status": status, "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None, "instructions": None, "metadata": {}, "model": model, "output": output,
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "temperature": None, "top_p": None,
        "usage": {
            "input_tokens": read, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": drawn, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + drawn,
        },
    }  # fmt: skip


def response_events(call: ModelCall, id: str, model: str, created: int) -> Iterator[dict[str, Any]]:
    """Yields the events of a stream with the answer of ``call``, which is complete when they are sent."""
    events = _events(response_object(call, id, model, created))
    yield from ({**event, "sequence_number": number} for number, event in enumerate(events))


def _events(whole: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(whole["output"]):
        about = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            (part,) = item["content"]
            within = {**about, "content_index": 0}
            yield {"type": "response.output_item.added", "output_index": index, "item": {**item, "status": "in_progress", "content": []}}
            yield {"type": "response.content_part.added", **within, "part": {**part, "text": ""}}
            yield {"type": "response.output_text.delta", **within, "delta": part["text"], "logprobs": []}
            yield {"type": "response.output_text.done", **within, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **within, "part": part}
        else:
            yield {"type": "response.output_item.added", "output_index": index, "item": {**item, "status": "in_progress", "arguments": ""}}
            yield {"type": "response.function_call_arguments.delta", **about, "delta": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **about, "name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}
