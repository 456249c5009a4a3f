"""Simulates the time that a run on many GPUs spends training, beside what failures and checkpoints take: a discrete-event simulation on a clock of its own.

The decisions are those of the code that runs: ``Backoff`` says how long a restart waits, ``LearnedDeadline`` when silence counts as a hang, and the trigger of
checkpoints, which the caller gives with the simulated clock, when a save is due. Seconds are the caller's: measured or published.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from tandem.config.watchdog import WatchdogConfig
from tandem.estimate.failures import Cause, FailureRates, Kind
from tandem.runtime.process.backoff import Backoff
from tandem.runtime.process.learned_deadline import LearnedDeadline

REPEATED, STALL, DETECTION, BACKOFF, NODE, START, LOAD = (
    "steps repeated", "stalls of checkpoints", "detection", "backoff", "waiting for a node", "starting processes", "loading the checkpoint",
)  # fmt: skip
"""What time is lost to."""


class Trigger(Protocol):
    """When to save, as ``CheckpointTrigger`` of the trainer."""

    def due(self, step: int) -> str:
        """Returns ``save`` if the state after ``step`` steps is to be saved."""
        ...

    def saved(self) -> None:
        """Is told that a save has started."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A place for checkpoints. ``trigger``: makes what decides when to save, from the simulated clock. ``stall_s``: how long training waits for a save;
    ``write_s``: from its beginning until it is committed; ``load_s``: to load it; ``survives``: the kinds of failures after which it can be read."""

    name: str
    trigger: Callable[[Callable[[], float]], Trigger]
    stall_s: float
    write_s: float
    load_s: float
    survives: frozenset[Kind] = frozenset(("process", "node", "hang"))


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds of a recovery. ``detect_s``: until the death of a process or a node is known; silence is called a hang by ``watchdog``, of which
    ``hang_most_s`` is the longest deadline. ``start_s``: from there to processes that can load a checkpoint. ``swap_s``: to put a spare node in the place of a
    lost one; ``repair_s``: until that one is a spare again."""

    detect_s: Mapping[Kind, float]
    start_s: float
    swap_s: float = 0.0
    repair_s: float = 0.0
    hang_most_s: float = 3600.0
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """``spares``: nodes that wait for the loss of another one. ``step_s``: of an undisturbed step."""

    gpus: int
    step_s: float
    spares: int
    rates: FailureRates
    recovery: Recovery
    tiers: Sequence[Tier]


@dataclass(frozen=True, slots=True)
class EffectiveTime:
    """``steps`` that were trained in ``seconds``; ``lost_s`` by what took it; ``failures`` by kind, and ``by_cause`` the seconds that each cause took."""

    seconds: float
    steps: int
    step_s: float
    lost_s: Mapping[str, float]
    failures: Mapping[Kind, int]
    by_cause: Mapping[str, float]

    @property
    def share(self) -> float:
        """Effective training time: the share of the seconds in which steps were trained that count."""
        return self.steps * self.step_s / self.seconds


def effective_time(run: SimulatedRun, seconds: float, seed: int = 0) -> EffectiveTime:
    """Simulates ``seconds`` of ``run`` with the failures of ``seed``, up to the end of the step or recovery in which they end."""
    return _Simulation(run, seed).until(seconds)


def expected_share(between_failures_s: float, interval_s: float, stall_s: float, restart_s: float) -> float:
    """Returns the expected share of effective training time in closed form (Daly 2006, equation 20): failures of a Poisson process, a checkpoint after each
    ``interval_s`` of work, which takes ``stall_s``, and ``restart_s`` after each failure, which may fail as well."""
    mean = between_failures_s
    return interval_s / (mean * math.exp(restart_s / mean) * math.expm1((interval_s + stall_s) / mean))


def best_interval_s(between_failures_s: float, stall_s: float) -> float:
    """Returns Young's first-order optimum of the seconds between two checkpoints (Young 1974)."""
    return math.sqrt(2 * stall_s * between_failures_s)


def daly_interval_s(between_failures_s: float, stall_s: float) -> float:
    """Returns Daly's higher-order optimum, which holds where stalls are no longer short beside the time between failures (Daly 2006, equation 37)."""
    if stall_s >= 2 * between_failures_s:
        return between_failures_s
    part = math.sqrt(stall_s / (2 * between_failures_s))
    return math.sqrt(2 * stall_s * between_failures_s) * (1 + part / 3 + part * part / 9) - stall_s


@dataclass
class _Saved:
    """A checkpoint of ``step`` that is committed from ``at_s`` on."""

    step: int
    at_s: float


class _Simulation:
    def __init__(self, run: SimulatedRun, seed: int) -> None:
        self._run, self._now_s, self._step = run, 0.0, 0
        self._failures: Iterator[tuple[float, Cause]] = run.rates.moments(run.gpus, random.Random(seed))
        self._next = next(self._failures)
        self._triggers = [tier.trigger(lambda: self._now_s) for tier in run.tiers]
        # Every tier has the state before the first step.
        self._saved: list[list[_Saved]] = [[_Saved(0, 0.0)] for _ in run.tiers]
        self._backoff = Backoff()
        watchdog = run.recovery.watchdog
        self._deadline = LearnedDeadline(watchdog.deadline_factor, watchdog.min_deadline_s, run.recovery.hang_most_s)
        self._repairs: list[float] = []
        self._spares = run.spares
        self._lost = dict.fromkeys((REPEATED, STALL, DETECTION, BACKOFF, NODE, START, LOAD), 0.0)
        self._counts: dict[Kind, int] = {"process": 0, "node": 0, "hang": 0}
        self._by_cause: dict[str, float] = {}

    def until(self, seconds: float) -> EffectiveTime:
        while self._now_s < seconds:
            began_s = self._now_s
            cause = self._spend(self._run.step_s)
            if cause is None:
                self._step += 1
                self._deadline.answered(self._run.step_s)
                cause = self._save()
            else:
                self._lose(REPEATED, self._now_s - began_s, cause)
            if cause is not None:
                self._recover(cause)
        return EffectiveTime(self._now_s, self._step, self._run.step_s, self._lost, self._counts, self._by_cause)

    def _spend(self, seconds: float) -> Cause | None:
        """Lets ``seconds`` pass, or those until the next failure, whose cause is returned."""
        at_s, cause = self._next
        if at_s >= self._now_s + seconds:
            self._now_s += seconds
            return None
        self._now_s = at_s
        self._next = next(self._failures)
        return cause

    def _lose(self, what: str, seconds: float, cause: Cause | None) -> None:
        self._lost[what] += seconds
        if cause is not None:
            self._by_cause[cause.name] = self._by_cause.get(cause.name, 0.0) + seconds

    def _save(self) -> Cause | None:
        for tier, trigger, saved in zip(self._run.tiers, self._triggers, self._saved, strict=True):
            if trigger.due(self._step) != "save":
                continue
            trigger.saved()
            began_s = self._now_s
            cause = self._spend(tier.stall_s)
            self._lose(STALL, self._now_s - began_s, None)
            if cause is not None:
                return cause
            # An older one is needed until this one is committed.
            del saved[: max(0, len(saved) - 2)]
            saved.append(_Saved(self._step, began_s + tier.write_s))
        return None

    def _recover(self, cause: Cause) -> None:
        """Restarts from the newest checkpoint that can be read. A further failure meanwhile begins it anew, after a longer wait."""
        while True:
            self._counts[cause.kind] += 1
            failed_s, failed_step, load_s = self._now_s, self._step, self._go_back(cause)
            detect_s = self._deadline() if cause.kind == "hang" else self._run.recovery.detect_s[cause.kind]
            stages: tuple[tuple[str, Callable[[], float]], ...] = (
                (DETECTION, partial(float, detect_s)), (BACKOFF, partial(self._backoff.wait_s, failed_step)),
                (NODE, partial(float, 0.0) if cause.kind == "process" else partial(self._take_node, failed_s)),
                (START, partial(float, self._run.recovery.start_s)), (LOAD, partial(float, load_s)),
            )  # fmt: skip
            again = None
            for what, takes_s in stages:
                began_s = self._now_s
                again = self._spend(takes_s())
                self._lose(what, self._now_s - began_s, cause)
                if again is not None:
                    break
            if again is None:
                return
            cause = again

    def _go_back(self, cause: Cause) -> float:
        """Goes back to the newest step that a tier has after the failure. Returns the seconds that it takes to load it, the fewest of those tiers."""
        step, _, place = -1, 0.0, 0
        for number, (tier, saved) in enumerate(zip(self._run.tiers, self._saved, strict=True)):
            if cause.kind not in tier.survives:
                # What it had is lost with the node; it begins again with the next save.
                self._saved[number] = []
                continue
            self._saved[number] = [each for each in saved if each.at_s <= self._now_s]
            newest = self._saved[number][-1].step if self._saved[number] else -1
            if newest > step or (newest == step and tier.load_s < self._run.tiers[place].load_s):
                step, place = newest, number
        if step < 0:
            raise ValueError("no tier of checkpoints survives every kind of failure")
        self._lose(REPEATED, (self._step - step) * self._run.step_s, cause)
        self._step = step
        return self._run.tiers[place].load_s

    def _take_node(self, failed_s: float) -> float:
        """Returns the seconds until a node is in the place of the lost one: a spare's, or of the first that is repaired."""
        repair_s = self._run.recovery.repair_s
        while self._repairs and self._repairs[0] <= self._now_s:
            heapq.heappop(self._repairs)
            self._spares += 1
        heapq.heappush(self._repairs, failed_s + repair_s)
        if self._spares:
            self._spares -= 1
            return self._run.recovery.swap_s
        return max(0.0, heapq.heappop(self._repairs) - self._now_s) + self._run.recovery.swap_s
