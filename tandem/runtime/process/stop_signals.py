"""Signals that ask a running job to save now, or to save and stop."""

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class SignalRequests:
    """A context manager in which SIGUSR1 sets ``save``, and SIGTERM and Ctrl-C (SIGINT) set ``stop``; the job reads them between two steps. A
    second SIGTERM or SIGINT raises ``KeyboardInterrupt`` at once. ``say`` receives a message at the first. Outside the main thread, where
    no handler can be set, both stay false."""

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self.save = self.stop = False
        self._say = say
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
        if self._say is not None:
            # The signal may interrupt a print, which cannot be entered a second time; then the message is left out.
            with contextlib.suppress(RuntimeError):
                self._say("stopping after this step, which is saved first; a second signal stops at once, and a resume starts from the newest checkpoint")
