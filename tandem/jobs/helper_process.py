"""A process beside a run that watches it or tells others of it: the run never waits for it, and starts it again where it has ended."""

import contextlib
import subprocess
import time
from collections.abc import Callable

from tandem.runtime.process.backoff import Backoff
from tandem.runtime.process.processes import describe_exit

_LONG_LIFE_S = 300.0
"""A process that has lived so long is started again as one that ends for the first time."""


class HelperProcess:
    """``start`` starts the process ``name``; ``say`` is told of its first end. Raises what ``start`` raises, the first time alone."""

    def __init__(self, name: str, start: Callable[[], "subprocess.Popen[bytes]"], say: Callable[[str], None]) -> None:
        self._name, self._start, self._say = name, start, say
        self._backoff, self._long_lives, self._due_s, self._is_down, self._has_said = Backoff(), 0, 0.0, False, False
        self.process, self._began_s = start(), time.monotonic()

    def look(self, *, now: bool = False) -> None:
        """Starts the process again if it has ended and its wait is over; with ``now`` at once."""
        if self.process.poll() is None:
            return
        at_s = time.monotonic()
        if not self._is_down:
            self._long_lives += at_s - self._began_s > _LONG_LIFE_S
            self._is_down, self._due_s = True, at_s + self._backoff.wait_s(self._long_lives)
            if not self._has_said:
                self._say(f"{self._name} has ended ({describe_exit(self.process.returncode)}) and is started again; the run does not wait for it")
                self._has_said = True
        if now or at_s >= self._due_s:
            self._is_down = False
            with contextlib.suppress(OSError):  # As with a full disk; it is tried again.
                self.process, self._began_s = self._start(), at_s
