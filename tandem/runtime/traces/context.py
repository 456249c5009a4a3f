"""The place of a piece of work in a trace, as W3C's trace context carries it between processes (https://www.w3.org/TR/trace-context/)."""

import contextlib
import contextvars
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import ParamSpec, TypeVar

HEADER = "traceparent"
_SAMPLED = 1
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SpanContext:
    """A span of a trace: ``trace_id`` in 32 and ``span_id`` in 16 hexadecimal digits. ``sampled``: spans of the trace are recorded."""

    trace_id: str
    span_id: str
    sampled: bool = True

    @property
    def traceparent(self) -> str:
        """The header that names it as the parent."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    def child(self) -> "SpanContext":
        """Returns a new span of the same trace."""
        return SpanContext(self.trace_id, os.urandom(8).hex(), self.sampled)


def parse_traceparent(text: str) -> SpanContext | None:
    """Returns the parent that a header names, ``None`` where it is not valid: the trace then begins here, as W3C asks."""
    matched = _TRACEPARENT.fullmatch(text.strip())
    if matched is None:
        return None
    version, trace_id, span_id, flags, more = matched.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return SpanContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def new_trace(ratio: float) -> SpanContext:
    """Returns the first span of a new trace, of which the share ``ratio`` is sampled."""
    ids = os.urandom(24)
    trace_id = ids[:16].hex()
    return SpanContext(trace_id, ids[16:].hex(), is_sampled(trace_id, ratio))


def derived_trace(name: str, part: str, ratio: float) -> SpanContext:
    """Returns the span of ``part`` in the trace that belongs to ``name``: whoever asks gets the same, in every process and after a restart."""
    trace_id = _digits(name, 16)
    return SpanContext(trace_id, _digits(f"{name}\0{part}", 8), is_sampled(trace_id, ratio))


def _digits(name: str, size: int) -> str:
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=size).hexdigest()


def is_sampled(trace_id: str, ratio: float) -> bool:
    """Returns whether a trace without a parent is sampled: as OpenTelemetry's ``TraceIdRatioBased``, so that every process decides alike."""
    return int(trace_id[16:], 16) < round(ratio * 2**64)


OUTSIDE = SpanContext("0" * 32, "0" * 16, sampled=False)
"""That of a span which belongs to no trace."""

_CURRENT: "contextvars.ContextVar[SpanContext | None]" = contextvars.ContextVar("tandem_span", default=None)


def current() -> SpanContext | None:
    """Returns the span that this thread or task works for; ``None``: none that is recorded."""
    return _CURRENT.get()


def enter(context: SpanContext | None) -> "contextvars.Token[SpanContext | None]":
    """Makes ``context`` the current one until ``leave``."""
    return _CURRENT.set(context)


def leave(token: "contextvars.Token[SpanContext | None]") -> None:
    """Makes that before ``enter`` the current one again."""
    _CURRENT.reset(token)


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Inside, nothing is recorded: for questions between processes that are no work of what is traced."""
    token = _CURRENT.set(None)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def in_context(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Returns ``function`` for another thread: what it records there belongs to the span that is current here."""
    context = _CURRENT.get()
    if context is None:
        return function

    def call(*arguments: _P.args, **keywords: _P.kwargs) -> _T:
        token = _CURRENT.set(context)
        try:
            return function(*arguments, **keywords)
        finally:
            _CURRENT.reset(token)

    return call
