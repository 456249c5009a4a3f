"""OpenAI's responses, in both directions: a request to the messages of a chat, and an answer as the object ``response``, whole or in events."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from tandem.serving.errors import ApiError, invalid
from tandem.serving.forms.answer import Answer
from tandem.serving.protocol import MAX_TOOLS, Body, Positive
from tandem.text.answer_events import CallArguments, CallBegun, Content, Event, Reasoning

_ITEMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "reasoning": ("rs", {"summary": [], "content": []}), "message": ("msg", {"role": "assistant", "content": []}), "function_call": ("fc", {"arguments": ""}),
}  # fmt: skip
"""Of each type of item, the beginning of its ids and what it has while it is empty."""


class ResponsesBody(Body):
    """``previous_response_id``: of an answer whose conversation this request continues."""

    not_supported: ClassVar[tuple[str, ...]] = ("background", "conversation", "prompt")

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    max_output_tokens: Positive | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = None

    def check(self) -> None:
        """Raises ``ApiError`` for a tool that is no function."""
        super().check()
        for tool in self.tools or []:
            if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
                raise invalid(f"a tool of type {str(tool.get('type'))[:40]!r} is not supported; give functions", "tools")

    def functions(self) -> list[dict[str, Any]]:
        """Returns the tools as chat completions have them."""
        named = ("name", "description", "parameters")
        return [{"type": "function", "function": {name: tool[name] for name in named if tool.get(name) is not None}} for tool in self.tools or []]

    def new_messages(self) -> list[dict[str, Any]]:
        """Returns the messages that the request adds to a conversation. Raises ``ApiError``."""
        return chat_messages([{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input)


def chat_messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the items of an input as the messages of a chat: the reasoning of the assistant, what it wrote and the functions that it called after it are
    one message. Raises ``ApiError`` for an item that is none of these."""
    messages: list[dict[str, Any]] = []
    thought = ""

    def assistant(**fields: Any) -> dict[str, Any]:
        nonlocal thought
        reasoning, thought = ({"reasoning_content": thought} if thought else {}), ""
        return {"role": "assistant", **fields, **reasoning}

    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            content = _content(item.get("content"))
            role = str(item.get("role"))
            messages.append(assistant(content=content) if role == "assistant" else {"role": role, "content": content})
        elif kind == "function_call":
            call = {"id": str(item.get("call_id", "")), "type": "function", "function": {"name": item.get("name"), "arguments": item.get("arguments", "")}}
            if messages and messages[-1]["role"] == "assistant" and not thought:
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append(assistant(content="", tool_calls=[call]))
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": _content(item.get("output"))})
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            thought = "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping)) if isinstance(parts, list) else ""
        else:
            raise invalid(f"an item of type {str(kind)[:40]!r} is not read; messages and functions are", "input")
    return messages


def _content(content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise invalid("the content of an item is neither a text nor a list of parts", "input")
    parts = [part for part in content if part.get("type") != "reasoning_text"]
    # A chat knows one type of text.
    return [{**part, "type": "text"} if part.get("type") in ("input_text", "output_text") else dict(part) for part in parts]


class ResponseWriter:
    """Writes an answer as the object ``response`` ``id`` and as the events of its stream. ``shown``: fields of the request that the object repeats."""

    def __init__(self, id: str, model: str, created: int, shown: Mapping[str, Any] | None = None) -> None:
        self._head = {"id": id, "object": "response", "created_at": created, "model": model}
        self._shown = {
            "instructions": None, "metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "temperature": None, "top_p": None,
            **(shown or {}),
        }  # fmt: skip
        self._output: list[dict[str, Any]] = []
        self._parts: list[str] = []
        """Of the text or the arguments of the last item, while it is open."""
        self._is_open = False
        self._number = 0
        self.whole: dict[str, Any] = {}
        """The object, once the answer has ended."""

    def begin(self, prompt: int) -> Iterator[dict[str, Any]]:
        """Yields the first events."""
        begun = {**self._head, **self._shown, "status": "in_progress", "error": None, "incomplete_details": None, "output": [], "usage": None}
        yield self._numbered({"type": "response.created", "response": begun})
        yield self._numbered({"type": "response.in_progress", "response": begun})

    def take(self, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
        """Yields the events of the stream for ``events`` of the answer."""
        yield from map(self._numbered, self._taken(events))

    def finish(self, answer: Answer) -> Iterator[dict[str, Any]]:
        """Yields the last events, and makes ``whole``."""
        is_cut = answer.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        if not self._output or (self._output[-1]["type"] == "reasoning" and not is_cut):
            yield from map(self._numbered, self._open("message"))
        yield from map(self._numbered, self._close(status))
        self.whole = {
            **self._head, **self._shown, "status": status, "error": None, "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
            "usage": {
                "input_tokens": answer.prompt, "input_tokens_details": {"cached_tokens": answer.cached}, "output_tokens": answer.completion,
                "output_tokens_details": {"reasoning_tokens": answer.thought}, "total_tokens": answer.prompt + answer.completion,
            },
        }  # fmt: skip
        yield self._numbered({"type": f"response.{status}", "response": self.whole})

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Returns the event of an error after the first event."""
        return self._numbered({"type": "error", "code": error.code or error.kind, "message": error.message, "param": error.param})

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        return {**event, "sequence_number": self._number - 1}

    def _taken(self, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
        for event in events:
            match event:
                case Reasoning(text):
                    yield from self._written("reasoning", "response.reasoning_text.delta", text)
                case Content(text):
                    yield from self._written("message", "response.output_text.delta", text)
                case CallBegun(name, id):
                    yield from self._close("completed")
                    yield from self._open("function_call", call_id=id, name=name)
                case CallArguments(text):
                    yield from self._written("function_call", "response.function_call_arguments.delta", text)

    def _written(self, kind: str, event: str, text: str) -> Iterator[dict[str, Any]]:
        if not self._is_open or self._output[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._open(kind)
        self._parts.append(text)
        within = {} if kind == "function_call" else {"content_index": 0}
        yield {"type": event, **self._about, **within, "delta": text, **({"logprobs": []} if kind == "message" else {})}

    @property
    def _about(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _open(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        prefix, more = _ITEMS[kind]
        self._output.append({"type": kind, "id": f"{prefix}_{self._head['id']}_{len(self._output)}", "status": "in_progress", **fields, **more})
        self._is_open = True
        yield {"type": "response.output_item.added", "output_index": len(self._output) - 1, "item": self._output[-1]}
        if kind != "function_call":
            yield {"type": "response.content_part.added", **self._about, "content_index": 0, "part": _part(kind, "")}

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        if not self._is_open:
            return
        item, text, about = self._output[-1], "".join(self._parts), self._about
        self._is_open = False
        self._parts.clear()
        if item["type"] == "function_call":
            self._output[-1] = item = {**item, "status": status, "arguments": text}
            yield {"type": "response.function_call_arguments.done", **about, "name": item["name"], "arguments": text}
        else:
            part, within = _part(item["type"], text), {**about, "content_index": 0}
            self._output[-1] = item = {**item, "status": status, "content": [part]}
            name = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            yield {"type": f"response.{name}.done", **within, "text": text, **({"logprobs": []} if name == "output_text" else {})}
            yield {"type": "response.content_part.done", **within, "part": part}
        yield {"type": "response.output_item.done", "output_index": about["output_index"], "item": item}


def _part(kind: str, text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text} if kind == "reasoning" else {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
