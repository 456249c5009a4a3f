"""An answer as clients get it, whole or as events: calls have names of their own, and what cannot be read as a call is text."""

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.text.answer_events import CallArguments, CallBegun, CallEnded, Content, Event, Reasoning, Unreadable
from tandem.text.answer_reader import AnswerReader, ReasoningFormat
from tandem.text.tool_formats import ToolFormat


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How the answers to a request are read. ``tools``, ``reasoning``, ``is_open`` and ``schemas`` as in ``AnswerReader``. ``shows_reasoning``: the client
    gets it. ``has_one_call``: further calls are left out. ``is_named``: the client named the tool, which ends the answer with ``stop``."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    is_open: bool = False
    schemas: Mapping[str, Any] = field(default_factory=dict)
    shows_reasoning: bool = True
    has_one_call: bool = False
    is_named: bool = False

    @property
    def reads(self) -> bool:
        """Whether there is anything but text to read."""
        return self.tools is not None or self.reasoning is not None


class AnswerStream:
    """The events of one answer: text, reasoning and calls, each with an ``id``."""

    def __init__(self, plan: AnswerPlan) -> None:
        self._plan = plan
        self._reader = AnswerReader(plan.tools, plan.reasoning, is_open=plan.is_open, schemas=plan.schemas)
        self.calls = 0
        self._is_left_out = False

    def take(self, text: str, is_end: bool) -> list[Event]:
        """Returns what ``text`` adds."""
        events = self._reader.push(text)
        return list(self._shown([*events, *self._reader.finish()] if is_end else events))

    def finish_reason(self, reason: str) -> str:
        """Returns ``reason``, or ``tool_calls`` where the answer ended by itself with calls."""
        return "tool_calls" if reason == "stop" and self.calls and not self._plan.is_named else reason

    def _shown(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            match event:
                case Reasoning():
                    if self._plan.shows_reasoning:
                        yield event
                case Unreadable(written, _):
                    yield Content(written)
                case CallBegun(name, id):
                    self._is_left_out = self._plan.has_one_call and self.calls > 0
                    if not self._is_left_out:
                        self.calls += 1
                        yield CallBegun(name, id or self._new_id())
                case CallArguments() | CallEnded():
                    if not self._is_left_out:
                        yield event
                case _:
                    yield event

    def _new_id(self) -> str:
        is_short = self._plan.tools is not None and self._plan.tools.short_ids
        return uuid.uuid4().hex[:9] if is_short else f"call_{uuid.uuid4().hex[:24]}"


@dataclass(slots=True)
class Call:
    """A call of a whole answer. ``parts``: of the JSON text of its arguments."""

    id: str
    name: str
    parts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


@dataclass(slots=True)
class Answer:
    """A whole answer. ``finish_reason`` as in chat completions. ``prompt``, ``completion``, ``cached``, ``thought``: numbers of tokens: of the prompt, of
    the answer, of the prompt that the prefix cache held, and of the reasoning."""

    reasoning_parts: list[str] = field(default_factory=list)
    content_parts: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    finish_reason: str = "stop"
    stop_text: str | None = None
    prompt: int = 0
    completion: int = 0
    cached: int = 0
    thought: int = 0

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_parts)

    @property
    def content(self) -> str:
        return "".join(self.content_parts)

    def add(self, events: Iterable[Event]) -> None:
        """Adds what ``events`` say."""
        for event in events:
            match event:
                case Reasoning(text):
                    self.reasoning_parts.append(text)
                case Content(text):
                    self.content_parts.append(text)
                case CallBegun(name, id):
                    self.calls.append(Call(id, name))
                case CallArguments(text):
                    self.calls[-1].parts.append(text)

    def events(self) -> Iterator[Event]:
        """Yields the events of the whole answer."""
        if self.reasoning_parts:
            yield Reasoning(self.reasoning)
        if self.content_parts:
            yield Content(self.content)
        for call in self.calls:
            yield CallBegun(call.name, call.id)
            yield CallArguments(call.arguments)

    def message(self) -> dict[str, Any]:
        """Returns the message of a chat with which a later request continues the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_parts:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in self.calls]
        return message
