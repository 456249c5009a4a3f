"""Passes the events of the first rank to its supervisor's callback, as progress of its call."""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.runtime.callback import Callback
from tandem.runtime.rpc.calls import Progress

EVENTS = ("started", "resumed", "phase", "progress", "row", "evaluated", "message", "health")


class ProgressCallback(Callback):
    """Sends every event through ``progress``."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def _send(self, kind: str, *values: Any) -> None:
        self._progress({"event": [kind, *values]})

    def resumed(self, step: int, accuracy: float | None) -> None:
        self._send("resumed", step, accuracy)

    def phase(self, name: str, step: int) -> None:
        self._send("phase", name, step)

    def progress(self, name: str, done: float, total: float, text: str = "") -> None:
        self._send("progress", name, done, total, text)

    def row(self, row: Mapping[str, float | int | str]) -> None:
        self._send("row", dict(row))

    def evaluated(self, step: int, accuracy: float, count: int, kind: str) -> None:
        self._send("evaluated", step, accuracy, count, kind)

    def message(self, text: str) -> None:
        self._send("message", text)

    def health(self, readings: Sequence[Sequence[Any]]) -> None:
        self._send("health", readings)


def tell(callback: Callback, progress: Mapping[str, Any]) -> None:
    """Calls the method of ``callback`` that a rank's ``ProgressCallback`` was called with."""
    kind, *values = progress["event"]
    if kind in EVENTS:
        getattr(callback, kind)(*values)
