"""Deadlines that the pauses of a process do not use up.

A process that was stopped and continued (SIGSTOP, a suspended virtual machine) finds that its clock jumped. Its peers were usually paused with
it, so that their silence means nothing: every deadline of the process starts anew. A wait with a deadline looks at the clock at least every
``LOOK_S``, so a clock that has not been looked at for ``PAUSE_S`` belongs to a process that was paused, or that waited for nothing.
"""

import math
import time
from collections.abc import Callable

LOOK_S = 0.25
"""The longest sleep of a wait with a deadline before it looks at the clock again."""
PAUSE_S = 1.0


class PauseClock:
    """A monotonic clock that notices the pauses of its process. ``resumed_s``: when the newest pause ended."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._looked_s = self.resumed_s = now()

    def look(self) -> float:
        """Returns the monotonic seconds now."""
        now = self._now()
        if now - self._looked_s > PAUSE_S:
            self.resumed_s = now
        self._looked_s = now
        return now


PROCESS_CLOCK = PauseClock()
"""The clock of this process. All threads look at one clock, so a thread that works for long is not taken for a pause."""


class Deadline:
    """``seconds`` from now, or from the end of the newest pause of this process. ``within``: a deadline that also applies."""

    def __init__(self, seconds: float, within: "Deadline | None" = None, clock: PauseClock = PROCESS_CLOCK) -> None:
        self.seconds, self._within, self._clock = seconds, within, clock
        self._began_s = clock.look()

    def left_s(self) -> float:
        """Returns the seconds that are left, 0 or fewer past the deadline."""
        now = self._clock.look()
        self._began_s = max(self._began_s, self._clock.resumed_s)
        left = self._began_s + self.seconds - now
        return left if self._within is None else min(left, self._within.left_s())

    @property
    def passed(self) -> bool:
        return self.left_s() <= 0

    def nap_s(self) -> float | None:
        """Returns how long a wait may sleep before it asks again, ``None`` for a deadline that never comes. Raises ``TimeoutError`` past the
        deadline."""
        left = self.left_s()
        if left <= 0:
            raise TimeoutError
        return None if math.isinf(left) else min(left, LOOK_S)
