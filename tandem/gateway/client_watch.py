"""Ends the work for a client when it leaves."""

import asyncio
from types import TracebackType

from tandem.runtime.rpc.patient_protocol import Patience


class WhileClientWaits:
    """Cancels what it contains when the client at ``connection`` leaves, and then ends without an error. ``task``: what is
    cancelled, the one that enters. ``has_left``: the client has."""

    __slots__ = ("_connection", "has_left", "task")

    def __init__(self, connection: Patience) -> None:
        self._connection, self.has_left = connection, False

    def __enter__(self) -> "WhileClientWaits":
        # Where the loop is not given, Python 3.11 makes a system call to find it.
        task = asyncio.current_task(self._connection.loop)
        assert task is not None
        self.task = task
        self._connection.when_lost(self._left)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self._connection.no_longer_when_lost(self._left)
        if not self.has_left or kind is not asyncio.CancelledError:
            return False
        self.task.uncancel()
        return True

    def _left(self) -> None:
        self.has_left = True
        self.task.cancel()
