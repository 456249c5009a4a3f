"""Whether an engine's process answers."""

from collections.abc import Callable


class Heartbeat:
    """The sign of life of one engine's process.

    ``ping`` is sent while an answer is expected of the process; a thread of it that does not take part in steps answers, so a long step is no
    silence, and neither is loading, before which none is sent. An idle engine is not asked, and uses no CPU. Silence is counted in periods in
    which this process ran, so a machine that was suspended, with all its processes, does not look like a hung engine.

    Args:
        limit_s: the silence after which the process counts as hung.
        step_s: how long the engine may work on one step or control call.
        ping: sends one ping.
    """

    def __init__(self, limit_s: float, step_s: float, ping: Callable[[], None]) -> None:
        self.period_s = min(1.0, limit_s / 4)
        self._limit_s, self._step_s, self._ping = limit_s, step_s, ping
        self._is_asked = False
        self._silent_periods = 0
        self._working_s = 0.0

    def ask(self) -> None:
        """Sends a ping if none is unanswered."""
        if not self._is_asked:
            self._is_asked, self._silent_periods = True, 0
            self._ping()

    def heard(self) -> None:
        """The process has sent something."""
        self._silent_periods = 0

    def answered(self, working_s: float) -> None:
        """The process has answered a ping; its engine has worked on the present step or call for ``working_s``."""
        self._is_asked, self._silent_periods, self._working_s = False, 0, working_s

    def tick(self, is_expected: bool) -> str | None:
        """Counts one period. Returns how the engine is hung, ``None`` if it is not. ``is_expected``: whether it has work, so that it is asked."""
        if self._is_asked:
            self._silent_periods += 1
        elif is_expected:
            self.ask()
        if self._silent_periods * self.period_s >= self._limit_s:
            return f"has not answered for {self._limit_s:g} s"
        if self._working_s >= self._step_s:
            return f"has worked on one step for {self._working_s:.0f} s"
        return None
