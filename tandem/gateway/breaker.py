"""The circuit breaker of a backend: closed, open, half-open."""

import enum
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tandem.config.gateway import BreakerConfig

_BUSY = (429, 503)


class Outcome(enum.Enum):
    """What an attempt says about the backend that it was made at."""

    SUCCESS = "success"
    """It answered; an error of the client's is an answer too."""
    BUSY = "busy"
    """It answered that it takes no more (429, 503): it works."""
    FAILURE = "failure"
    """It did not answer, broke off, or answered with another status from 500."""
    UNKNOWN = "unknown"
    """Nothing: the client left, or the request itself is to blame."""

    @classmethod
    def of_status(cls, status: int) -> "Outcome":
        """Returns what an answer with ``status`` says."""
        return cls.BUSY if status in _BUSY else cls.FAILURE if status >= 500 else cls.SUCCESS


@dataclass(frozen=True, slots=True)
class Pass:
    """Permission for one attempt. ``generation``: of the state that gave it; what attempts of earlier states say no longer counts.
    ``is_trial``: it holds the one place of the half-open state."""

    generation: int
    is_trial: bool


class Breaker:
    """Gives passes while the backend works, none while it does not, and after a while one at a time to see whether it works again.

    Every pass is given back by ``report``, with ``Outcome.UNKNOWN`` if there is nothing to say, so that a trial whose client leaves does not keep the
    place of the next one."""

    def __init__(self, config: BreakerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self.may_open: Callable[[], bool] = lambda: True
        """Whether it may open now; asked when it would."""
        self._generation = 0
        self._openings = 0
        self.is_closed = True
        """Whether every attempt may be made."""
        self._opened_until, self._trial_runs, self._successes = 0.0, False, 0
        self._failures_in_a_row = 0
        self._newest: deque[bool] = deque(maxlen=config.window)

    def follow(self, config: BreakerConfig) -> None:
        """Takes other settings; its state stays."""
        self._config = config
        self._newest = deque(self._newest, maxlen=config.window)

    @property
    def state(self) -> str:
        """``closed``, ``open`` or ``half_open``."""
        return "closed" if self.is_closed else "open" if self._clock() < self._opened_until else "half_open"

    @property
    def opens_in_s(self) -> float:
        """Seconds until the next attempt may be made; 0 if one may now or as soon as the trial ends."""
        return 0.0 if self.is_closed else max(0.0, self._opened_until - self._clock())

    def allows(self) -> bool:
        """Returns whether ``take`` may be called."""
        return self.is_closed or (not self._trial_runs and self._clock() >= self._opened_until)

    def take(self) -> Pass:
        """Returns the permission for an attempt."""
        assert self.allows(), "a pass is taken only while the breaker gives them"
        self._trial_runs = not self.is_closed
        return Pass(self._generation, self._trial_runs)

    def report(self, given: Pass, outcome: Outcome) -> None:
        """Takes back the pass of an attempt that ended with ``outcome``."""
        if given.generation != self._generation:
            return
        if given.is_trial:
            self._end_trial(outcome)
        elif outcome in (Outcome.SUCCESS, Outcome.FAILURE):
            self._count(outcome is Outcome.FAILURE)

    def reset(self) -> None:
        """Closes it: the backend was away and is back, so that what failed was another process."""
        self._generation += 1
        self._openings = 0
        self.is_closed, self._trial_runs, self._successes, self._failures_in_a_row = True, False, 0, 0
        self._newest.clear()

    def _end_trial(self, outcome: Outcome) -> None:
        self._trial_runs = False
        if outcome is Outcome.FAILURE:
            self._open()
        elif outcome is not Outcome.UNKNOWN:
            self._successes += 1
            if self._successes >= self._config.successes:
                self.reset()

    def _count(self, has_failed: bool) -> None:
        self._failures_in_a_row = self._failures_in_a_row + 1 if has_failed else 0
        self._newest.append(has_failed)
        share = sum(self._newest) / self._config.window
        is_too_much = self._failures_in_a_row >= self._config.failures or share >= self._config.failure_share
        if has_failed and is_too_much and self.may_open():
            self._open()

    def _open(self) -> None:
        seconds = min(self._config.max_open_s, self._config.open_s * 2 ** min(self._openings, 32))
        self._generation += 1
        self._openings += 1
        self.is_closed, self._opened_until, self._successes = False, self._clock() + seconds, 0
        self._trial_runs = False
        self._newest.clear()
