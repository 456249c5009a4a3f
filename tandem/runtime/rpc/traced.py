"""The trace of a call: its frame names the span that it is made for, and its answers bring the spans of the other side, which needs no way to a collector."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tandem.runtime.traces.context import current, parse_traceparent
from tandem.runtime.traces.spans import MOST_IN_A_REPLY, SPANS, OpenSpan, begin, from_json, to_json
from tandem.types.wire import Frame

_ANSWERS = ("result", "error", "progress", "heartbeat")


def sent_with(kind: str) -> tuple[str, list[list[Any]]]:
    """Returns the ``trace`` and the ``spans`` of a frame that is sent: a call's current span, and with an answer what this process has recorded."""
    if kind == "call":
        context = current()
        return "" if context is None else context.traceparent, []
    if len(SPANS) and kind in _ANSWERS:
        return "", to_json(SPANS.take(MOST_IN_A_REPLY))
    return "", []


def receive_spans(spans: Sequence[Any]) -> None:
    """Keeps the ``spans`` that came from another process, as JSON. One that is not a span is counted as dropped: no call fails because of it."""
    for value in spans:
        try:
            [span] = from_json([value])
        except ValueError:
            SPANS.dropped += 1
        else:
            SPANS.add(span)


def call_span(call: Frame, name: str = "") -> "AbstractContextManager[OpenSpan | None]":
    """Records the block as the work of ``call``, if its caller is traced."""
    parent = parse_traceparent(call.trace) if call.trace else None
    opened = None if parent is None else begin(name or call.method, parent, kind="server")
    return nullcontext() if opened is None else opened
