"""The trace of a call: its frame names the span that it is made for, and its answers bring the spans of the other side, which needs no way to a collector."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from tandem.runtime.traces.context import current, parse_traceparent
from tandem.runtime.traces.spans import MOST_IN_A_FRAME, MOST_SPANS, SPANS, OpenSpan, begin
from tandem.types.wire import Frame

if TYPE_CHECKING:
    from tandem.runtime.rpc.channel import Channel

_ANSWERS = ("result", "error", "progress", "heartbeat")


def sent_with(kind: str) -> tuple[str, list[Any]]:
    """Returns the ``trace`` and the ``spans`` of a frame that is sent: a call's current span, and with an answer what this process has recorded, and how many
    it has dropped."""
    if kind == "call":
        context = current()
        return "" if context is None else context.traceparent, []
    if len(SPANS) and kind in _ANSWERS:
        # What follows an answer would wait for the next call.
        spans: list[Any] = SPANS.take_json(MOST_SPANS if kind in ("result", "error") else MOST_IN_A_FRAME)
        return "", [*spans, SPANS.take_dropped()] if SPANS.dropped else spans
    return "", []


def receive_spans(spans: Sequence[Any]) -> None:
    """Keeps the ``spans`` that came from another process, as JSON; a number among them is that of those which it has dropped. One that is not a span is
    counted as dropped, here or when it is read: no call fails because of it."""
    for value in spans:
        if type(value) is list:
            SPANS.add(value)
        else:
            SPANS.dropped += max(0, value) if type(value) is int else 1


def call_span(call: Frame, name: str = "") -> "AbstractContextManager[OpenSpan | None]":
    """Records the block as the work of ``call``, if its caller is traced."""
    parent = parse_traceparent(call.trace) if call.trace else None
    opened = None if parent is None else begin(name or call.method, parent, kind="server")
    return nullcontext() if opened is None else opened


class SpanSender:
    """Sends the spans of a process to its ``owner`` every ``period_s`` while a call lasts: that of a whole run may last for days."""

    def __init__(self, owner: "Channel", period_s: float = 1.0) -> None:
        self._owner, self._period_s = owner, period_s
        self._call = 0
        threading.Thread(target=self._run, name="spans", daemon=True).start()

    @contextmanager
    def during(self, call: int) -> Iterator[None]:
        """Inside, the call of number ``call`` lasts."""
        self._call = call
        try:
            yield
        finally:
            self._call = 0

    def _run(self) -> None:
        # The owner may close the channel at any time.
        with suppress(OSError, EOFError):
            while True:
                time.sleep(self._period_s)
                if self._call and len(SPANS):
                    self._owner.send({}, kind="heartbeat", call=self._call)
