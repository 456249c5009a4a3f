"""Signals that ask a running job to save now, or to save and stop."""

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self


class SignalRequests:
    """A context manager in which SIGUSR1 sets ``save``, and SIGTERM and Ctrl-C (SIGINT) set ``stop``; the job reads them between two steps. A
    second SIGTERM or SIGINT raises ``KeyboardInterrupt`` at once. ``say`` receives a message at the first. ``is_stop_wanted``: another
    reason to stop. Outside the main thread, where no handler can be set, there is no other."""

    def __init__(self, say: Callable[[str], None] | None = None, is_stop_wanted: Callable[[], bool] = lambda: False) -> None:
        self.save = self._is_signalled = False
        self._say, self._is_stop_wanted = say, is_stop_wanted
        self._before: dict[int, Any] = {}

    @property
    def stop(self) -> bool:
        """Whether to save and stop."""
        return self._is_signalled or self._is_stop_wanted()

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
        if self._is_signalled:
            raise KeyboardInterrupt
        self._is_signalled = True
        if self._say is not None:
            # The signal may interrupt a print, which cannot be entered a second time; then the message is left out.
            with contextlib.suppress(RuntimeError):
                self._say("stopping after this step, which is saved first; a second signal stops at once, and a resume starts from the newest checkpoint")
