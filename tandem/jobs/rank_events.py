"""What a rank tells its supervisor, as JSON lines in a pipe: what a listener hears, how it ended, and what came of it."""

import json
import os
from collections.abc import Mapping
from typing import Any

from tandem.runtime.listener import Listener

HEARD = ("started", "phase", "progress", "row", "evaluated", "message")


class EventPipe(Listener):
    """A listener at the other end of ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, kind: str, *values: Any) -> None:
        # One write a line, from one thread: lines are never mixed.
        data = json.dumps([kind, *values]).encode("ascii") + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]

    def phase(self, name: str, step: int) -> None:
        self.send("phase", name, step)

    def progress(self, name: str, done: float, total: float, text: str = "") -> None:
        self.send("progress", name, done, total, text)

    def row(self, row: Mapping[str, float | int | str]) -> None:
        self.send("row", dict(row))

    def evaluated(self, step: int, accuracy: float, count: int, kind: str) -> None:
        self.send("evaluated", step, accuracy, count, kind)

    def message(self, text: str) -> None:
        self.send("message", text)


class EventReader:
    """Lines from a pipe that is not waited for."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        os.set_blocking(descriptor, False)
        self._rest = b""

    def read(self) -> list[list[Any]]:
        """Events that are there now."""
        while True:
            try:
                data = os.read(self.descriptor, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                break
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        os.close(self.descriptor)


def tell(listener: Listener, event: list[Any]) -> None:
    """Give ``listener`` what a rank's listener heard."""
    kind, *values = event
    if kind in HEARD:
        getattr(listener, kind)(*values)
