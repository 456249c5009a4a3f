"""What a running job is asked by signals: to save now, or to save and end."""

import signal
import threading
from types import FrameType
from typing import Any


class SignalRequests:
    """While it is entered, SIGUSR1 sets ``save`` and SIGTERM ``stop``, for the job to look at between two steps. A second SIGTERM
    interrupts at once. Outside the main thread, where no handler can be set, nothing is asked."""

    def __init__(self) -> None:
        self.save = self.stop = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "SignalRequests":
        if threading.current_thread() is threading.main_thread():
            for number, act in ((signal.SIGUSR1, self._save), (signal.SIGTERM, self._stop)):
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
