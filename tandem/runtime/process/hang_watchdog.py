"""Finds hung ranks, with a deadline learned from the gaps between their signs of life."""

from collections.abc import Sequence

from tandem.runtime.process.heartbeat_table import RankState
from tandem.runtime.process.learned_deadline import LearnedDeadline

FACTOR = 20.0
"""The deadline is this many times the longest gap between two signs of life."""
STEPS = 3
"""Steps after which the learned deadline applies: the first steps are slower than the others."""
START_S = 300.0
"""The shortest deadline for the start of all ranks, which import torch and find each other."""


class HangWatchdog:
    """Watches the heartbeats of ranks. Signs of life are: a new phase, a finished micro-batch, the start and the end of the wait for a
    collective.

    The deadline is ``first_s`` until ``STEPS`` steps have passed, then ``FACTOR`` times the longest gap in a step, at least ``least_s`` and at
    most ``first_s``. In phases outside of a step (a checkpoint) it stays ``first_s``; until every rank has begun it is at least ``START_S``.

    Without ``sees_all`` other ranks are on other machines: those here that are all blocked in collectives wait for one that may still have time, and count
    as hung after twice ``first_s``, when who watches that one has had its turn."""

    IN_STEP = frozenset({"train", "forward", "backward", "reduce", "optimizer"})

    def __init__(self, first_s: float, least_s: float, *, sees_all: bool = True) -> None:
        self.first_s, self.sees_all = first_s, sees_all
        self.learned = LearnedDeadline(FACTOR, least_s, first_s)
        self._before: dict[int, RankState] = {}
        self._first_step: int | None = None
        self._steps = 0
        self._began_s: float | None = None

    def deadline_s(self, phase: str) -> float:
        """Returns the seconds without a sign of life in ``phase`` after which a rank counts as hung."""
        if self._steps < STEPS or phase not in self.IN_STEP:
            return self.first_s
        return self.learned()

    def look(self, states: Sequence[RankState], now_s: float, resumed_s: float = 0.0) -> list[RankState]:
        """Returns the hung ranks: of those past their deadline, the ones that the others wait for. ``resumed_s``: when this process last
        continued after a pause, in which its ranks were probably paused too (``PauseClock``); deadlines start anew then."""
        if self._began_s is None:
            self._began_s = now_s
        for state in states:
            before = self._before.get(state.rank)
            is_next = before is not None and before.beat_s != state.beat_s and before.pid == state.pid
            # A gap with a pause in it says nothing about the run.
            if is_next and before is not None and before.beat_s >= resumed_s and {before.phase, state.phase} <= self.IN_STEP:
                self.learned.answered(state.beat_s - before.beat_s)
            self._before[state.rank] = state
        begun = [state.step for state in states if state.phase in self.IN_STEP]
        if begun:
            self._first_step = min(begun) if self._first_step is None else self._first_step
            self._steps = max(self._steps, min(begun) - self._first_step)
        # No other deadline runs until every rank has begun.
        if waited_for := [state for state in states if state.beat_s == 0]:
            return waited_for if now_s - max(self._began_s, resumed_s) > max(START_S, self.first_s) else []
        late = [state for state in states if now_s - max(state.beat_s, resumed_s) > self.deadline_s(state.phase)]
        if not late:
            return []
        idle = [state for state in states if not state.collective and state in late]
        if idle:
            return idle
        if not all(state.collective for state in states):
            # They wait for a rank that still has time: it reads data, or writes a checkpoint.
            return []
        if not self.sees_all and all(now_s - max(state.beat_s, resumed_s) <= 2 * self.first_s for state in late):
            return []
        # All are blocked in collectives: the ranks with the fewest calls are in an earlier one than the others.
        fewest = min(state.collectives for state in states)
        return [state for state in states if state.collectives == fewest]
