"""What a running job is asked by signals: to save now, or to save and end."""

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class SignalRequests:
    """While it is entered, SIGUSR1 sets ``save``, SIGTERM and Ctrl-C (SIGINT) ``stop``, for the job to look at between two steps. A second of
    these interrupts at once. ``told``: is told so at the first. Outside the main thread, where no handler can be set, nothing is asked."""

    def __init__(self, told: Callable[[str], None] | None = None) -> None:
        self.save = self.stop = False
        self._told = told
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number, act in ((signal.SIGUSR1, self._save), (signal.SIGTERM, self._stop), (signal.SIGINT, self._stop)):
                self._before[number] = signal.signal(number, act)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _save(self, number: int, frame: FrameType | None) -> None:
        self.save = True

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True
        if self._told is not None:
            # A signal in the middle of a line that is being printed: the line goes on, and this one is left out.
            with contextlib.suppress(RuntimeError):
                self._told("stopping: this step is finished and saved first; once more ends at once, from the newest checkpoint")
