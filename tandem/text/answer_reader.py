"""Reads an answer while a model writes it: its reasoning, its text and its tool calls."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.text.answer_events import CallArguments, Content, Event, Reasoning
from tandem.text.harmony import ANALYSIS, END, read_harmony
from tandem.text.json_call import JsonCall, json_object
from tandem.text.pieces import Pieces, Steps
from tandem.text.tool_formats import Schemas, ToolFormat


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around reasoning. ``is_open``: an answer begins within it although it writes no ``start``, unless its prompt has closed it. ``content``: the
    marks around the text of the answer, if there are any. ``read``: reads an answer whose calls, reasoning and text are messages of one form."""

    start: str
    end: str
    is_open: bool = False
    content: tuple[str, str] | None = None
    read: Callable[[Pieces, Schemas], Steps[None]] | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks, which special tokens may be."""
        return (self.start, self.end, *(self.content or ()))

    def begins_within(self, prompt_end: str) -> bool:
        """Returns whether an answer begins within reasoning, after a prompt whose text ends with ``prompt_end``."""
        opened, closed = prompt_end.rstrip().endswith(self.start), prompt_end.rstrip().endswith(self.end)
        return opened or (self.is_open and not closed)


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "glm45": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", is_open=True),
    "deepseek_v3": ReasoningFormat("<think>", "</think>"),
    "kimi_k2": ReasoningFormat("<think>", "</think>"),
    "minimax_m2": ReasoningFormat("<think>", "</think>", is_open=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "olmo3": ReasoningFormat("<think>", "</think>", is_open=True),
    "cohere_command3": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>", content=("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    "openai_gptoss": ReasoningFormat(ANALYSIS, END, read=read_harmony),
}
"""With vLLM's names. The prompt of most models says whether the answer begins within reasoning; otherwise the answer's first mark does."""


def list_of_calls(source: Pieces, schemas: Schemas) -> Steps[None]:
    """Reads a JSON list of calls, the form that a grammar gives an answer which must have calls."""
    yield from source.begins_with("[")
    call: JsonCall | None = None
    while (yield from source.begins_with("{", is_taken=False)):
        call = JsonCall()
        yield from json_object(source, call)
        yield from source.begins_with(",")
    if call is None:
        yield from source.pass_until()
    yield from source.until()


def arguments_of(name: str) -> ToolFormat:
    """The format of an answer that is the arguments of the tool ``name`` alone."""

    def read(source: Pieces, schemas: Schemas) -> Steps[None]:
        if (yield from source.begins_with("{", is_taken=False)):
            yield from json_object(source, JsonCall(name))
            yield from source.until()
        else:
            yield from source.pass_until()

    return ToolFormat(read)


class AnswerReader:
    """``tools``: how calls are written, ``None`` reads none. ``reasoning``: how reasoning is, ``None`` reads none; ``is_open``: the answer begins within
    it. ``schemas``: of the tools. The events do not depend on how the text is cut, apart from the cuts of their texts."""

    def __init__(
        self, tools: ToolFormat | None = None, reasoning: ReasoningFormat | None = None, *, is_open: bool = False, schemas: Mapping[str, Any] | None = None
    ) -> None:
        self._source = Pieces()
        self._steps = _answer(self._source, tools, reasoning, is_open, schemas or {})

    def push(self, text: str) -> list[Event]:
        """Returns what ``text`` adds."""
        self._source.text += text
        return self._events()

    def finish(self) -> list[Event]:
        """Returns what was held back, at the end of the text."""
        self._source.is_over = True
        return self._events()

    def read(self, text: str) -> list[Event]:
        """Returns the events of the whole answer ``text``."""
        self._source.is_over = True
        return self.push(text)

    def _events(self) -> list[Event]:
        events: list[Event] = []
        for event in self._steps:
            if event is None:
                break
            last = events[-1] if events else None
            if isinstance(event, Content | Reasoning | CallArguments) and type(last) is type(event):
                events[-1] = event._replace(text=last.text + event.text)  # type: ignore[union-attr]
            else:
                events.append(event)
        return events


def _answer(source: Pieces, tools: ToolFormat | None, reasoning: ReasoningFormat | None, is_open: bool, schemas: Schemas) -> Iterator[Event | None]:
    read = None if tools is None else tools.read
    if reasoning is not None and reasoning.read is not None and read in (None, reasoning.read):
        read = reasoning.read
    elif reasoning is not None:
        is_open = (yield from source.begins_with(reasoning.start)) or is_open
    if reasoning is not None and is_open:
        yield from source.pass_until(reasoning.end, kind=Reasoning, is_trimmed=True)
        yield from source.skip_space()
    if reasoning is not None and reasoning.content is not None and (yield from source.begins_with(reasoning.content[0])):
        yield from source.pass_until(reasoning.content[1])
        yield from source.until()
    elif read is not None:
        yield from read(source, schemas)
    else:
        yield from source.pass_until()
