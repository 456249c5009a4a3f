"""Spans: pieces of work with a beginning, an end and a place in a trace. Needs the standard library alone.

Where no trace is recorded, a span costs one look-up. A process keeps ended spans until they are taken: a reply to its caller (``rpc``),
or the exporter of the process that sends them to a collector.
"""

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any, Literal

from tandem.runtime.traces.context import SpanContext, current, enter, leave
from tandem.types.one_line import describe

Kind = Literal["internal", "server", "client"]
Value = str | bool | int | float
Attributes = Mapping[str, Value]
KINDS: tuple[Kind, ...] = ("internal", "server", "client")
MOST_SPANS = 8192
"""The most spans that a process keeps, about 5 MB."""
MOST_IN_A_FRAME = 2048
UNNAMED = "tandem"
"""The service of a process that has not said what it is."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process as the resource of its spans. ``service``: what it is (``trainer_worker``, ``gateway``); ``run``: the run that it belongs to; ``rank``: -1
    where it has none."""

    service: str
    run: str = ""
    rank: int = -1
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


@dataclass(frozen=True, slots=True)
class Span:
    """A span that has ended. Times are nanoseconds since the epoch. ``error``: why it failed, empty if it did not. ``events``: what happened in it, each with
    its time and attributes."""

    context: SpanContext
    parent_id: str
    name: str
    kind: Kind
    start_ns: int
    end_ns: int
    process: Process
    attributes: dict[str, Value] = field(default_factory=dict)
    events: tuple[tuple[str, int, dict[str, Value]], ...] = ()
    error: str = ""


class Spans:
    """The spans of this process that have ended and were not taken yet, at most ``limit``; further ones are counted in ``dropped``. Thread-safe.

    Those of other processes stay as they came until they are read: most are only passed on. ``on_many`` is called when there are ``many``."""

    def __init__(self, limit: int = MOST_SPANS) -> None:
        self.limit, self.dropped = limit, 0
        self.process = Process(UNNAMED)
        self.many = MOST_SPANS
        self.on_many: Callable[[], object] = lambda: None
        self._ended: deque[Span | list[Any]] = deque()

    def identify(self, service: str, run: str = "", rank: int = -1) -> None:
        """Says what this process is."""
        self.process = Process(service, run, rank)

    def add(self, span: "Span | list[Any]") -> None:
        """Takes a span of this process, or one of another as ``to_json`` wrote it."""
        count = len(self._ended)
        if count < self.limit:
            self._ended.append(span)
            if count == self.many:
                self.on_many()
        else:
            self.dropped += 1

    def take(self, most: int = MOST_IN_A_FRAME) -> list[Span]:
        """Returns the oldest spans, at most ``most``, and forgets them. What came from another process and is no span is counted as dropped."""
        taken: list[Span] = []
        for each in self._oldest(most):
            try:
                taken.append(each if isinstance(each, Span) else from_json(each))
            except ValueError:
                self.dropped += 1
        return taken

    def take_json(self, most: int = MOST_IN_A_FRAME) -> list[list[Any]]:
        """Does as ``take`` for another process: each span is as ``to_json`` returns it."""
        return [to_json(each) if isinstance(each, Span) else each for each in self._oldest(most)]

    def _oldest(self, most: int) -> "list[Span | list[Any]]":
        taken: list[Span | list[Any]] = []
        with contextlib.suppress(IndexError):
            while len(taken) < most:
                taken.append(self._ended.popleft())
        return taken

    def take_dropped(self) -> int:
        """Returns how many were dropped, and begins to count again."""
        dropped, self.dropped = self.dropped, 0
        return dropped

    def __len__(self) -> int:
        return len(self._ended)


SPANS = Spans()
"""Those of this process."""


class OpenSpan:
    """A span that has begun. As a context it is the current one of its thread or task, and an exception that leaves it is its ``error``."""

    __slots__ = ("_attributes", "_began", "_events", "_kind", "_name", "_parent_id", "_start_ns", "_token", "context", "error")

    def __init__(self, name: str, context: SpanContext, parent_id: str, kind: Kind, attributes: Attributes) -> None:
        self.context, self.error = context, ""
        self._name, self._parent_id, self._kind, self._attributes = name, parent_id, kind, dict(attributes)
        self._events: list[tuple[str, int, dict[str, Value]]] = []
        # The wall clock may be set meanwhile.
        self._start_ns, self._began = time.time_ns(), time.perf_counter_ns()

    def update(self, attributes: Attributes) -> None:
        """Adds ``attributes``."""
        self._attributes.update(attributes)

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Records that ``name`` happened now."""
        self._events.append((name, self._now_ns(), dict(attributes or {})))

    def end(self) -> Span:
        """Ends it and, if its trace is sampled, keeps it for whoever takes the spans of this process."""
        span = Span(
            self.context, self._parent_id, self._name, self._kind, self._start_ns, self._now_ns(), SPANS.process, self._attributes,
            tuple(self._events), self.error,
        )  # fmt: skip
        if self.context.sampled:
            SPANS.add(span)
        return span

    def __enter__(self) -> "OpenSpan":
        self._token = enter(self.context)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        leave(self._token)
        if error is not None and not self.error:
            self.error = describe(error)
        self.end()

    def _now_ns(self) -> int:
        return self._start_ns + time.perf_counter_ns() - self._began


def begin(name: str, parent: SpanContext, attributes: Attributes | None = None, kind: Kind = "internal") -> OpenSpan | None:
    """Begins a child of ``parent``; ``None`` if its trace is not sampled."""
    return OpenSpan(name, parent.child(), parent.span_id, kind, attributes or {}) if parent.sampled else None


def begin_first(name: str, first: SpanContext, attributes: Attributes | None = None, kind: Kind = "internal") -> OpenSpan | None:
    """Begins ``first``, the first span of its trace; ``None`` if that is not sampled."""
    return OpenSpan(name, first, "", kind, attributes or {}) if first.sampled else None


def span(name: str, attributes: Attributes | None = None, kind: Kind = "internal") -> "contextlib.AbstractContextManager[OpenSpan | None]":
    """Records the block as a child of the current span; without one it costs a look-up, and the context is ``None``."""
    parent = current()
    opened = None if parent is None else begin(name, parent, attributes, kind)
    return contextlib.nullcontext() if opened is None else opened


def note(name: str, parent: SpanContext, start_ns: int, end_ns: int, attributes: Attributes | None = None) -> None:
    """Records a child of ``parent`` that has been measured already."""
    if parent.sampled:
        SPANS.add(Span(parent.child(), parent.span_id, name, "internal", start_ns, max(start_ns, end_ns), SPANS.process, dict(attributes or {})))


# -- between processes ----------------------------------------------------------------------------------------------------


def to_json(span: Span) -> list[Any]:
    """Returns ``span`` as a JSON value."""
    process = span.process
    return [
        span.context.trace_id, span.context.span_id, span.parent_id, span.name, KINDS.index(span.kind), span.start_ns, span.end_ns, span.error,
        span.attributes, span.events, [process.service, process.run, process.rank, process.host, process.pid],
    ]  # fmt: skip


def from_json(value: Any) -> Span:
    """Returns the span that ``to_json`` wrote. Raises ``ValueError`` for anything else."""
    try:
        return _span_of(*value)
    except (TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"not a span: {error}") from None


def _span_of(
    trace_id: str, span_id: str, parent_id: str, name: str, kind: int, start_ns: int, end_ns: int, error: str, attributes: dict[str, Value],
    events: list[Any], process: list[Any],
) -> Span:  # fmt: skip
    for digits, length in ((trace_id, 32), (span_id, 16), (parent_id or "0" * 16, 16)):
        if len(digits) != length:
            raise ValueError(f"not a span: its id has {len(digits)} digits")
        int(digits, 16)
    if not (isinstance(name, str) and isinstance(error, str) and type(start_ns) is int and type(end_ns) is int):
        raise ValueError("not a span: its name, error or times have other types")
    happened = tuple((str(what), int(at), _values(more)) for what, at, more in events)
    return Span(
        SpanContext(trace_id, span_id), parent_id, name, KINDS[kind], start_ns, end_ns, _process_of(*process), _values(attributes), happened, error
    )


@lru_cache(maxsize=1024)
def _process_of(service: Any, run: Any, rank: Any, host: Any, pid: Any) -> Process:
    return Process(str(service), str(run), int(rank), str(host), int(pid))


def _values(attributes: dict[Any, Any]) -> dict[str, Value]:
    return {str(key): value if isinstance(value, str | bool | int | float) else str(value) for key, value in attributes.items()}
