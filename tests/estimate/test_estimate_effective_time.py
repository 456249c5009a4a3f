"""The simulated effective training time, compared with closed forms, with cases worked by hand and with what is published."""

import math
import random
from collections.abc import Callable

import pytest

from tandem.config.checkpoint import CheckpointConfig
from tandem.config.watchdog import WatchdogConfig
from tandem.estimate import effective_time as model
from tandem.estimate.effective_time import EffectiveTime, Recovery, SimulatedRun, Tier, best_interval_s, effective_time, expected_share
from tandem.estimate.failures import DAY_S, LLAMA3, Cause, FailureRates, Kind
from tandem.runtime.process.stop_signals import SignalRequests
from tandem.trainer.checkpoint.trigger import CheckpointTrigger

HOUR_S = 3600.0


def every(steps: int) -> Callable[[Callable[[], float]], CheckpointTrigger]:
    """Returns what makes the trigger of a run with ``checkpoint.every_steps``, with the simulated clock."""
    return lambda clock: CheckpointTrigger(CheckpointConfig(every_steps=steps), SignalRequests(lambda text: None), clock=clock)


def rates(between_s: float, kind: Kind = "process") -> FailureRates:
    """Returns those of a run on one GPU that fails every ``between_s`` on average."""
    return FailureRates("a test", between_s / DAY_S, (Cause("fault", 1, kind),))


def simulated(between_s: float, interval_steps: int, stall_s: float = 0.0, start_s: float = 0.0, *, seconds: float) -> EffectiveTime:
    recovery = Recovery({"process": 0.0, "node": 0.0}, start_s)
    run = SimulatedRun(1, 10.0, 0, rates(between_s), recovery, [Tier("disk", every(interval_steps), stall_s, stall_s, 0.0)])
    return effective_time(run, seconds)


@pytest.mark.parametrize(("between_h", "interval_steps", "stall_s", "start_s"), [
    (1, 30, 60, 60), pytest.param(3, 60, 20, 300, marks=pytest.mark.full), pytest.param(10, 360, 5, 900, marks=pytest.mark.full),
])  # fmt: skip
def test_the_share_is_the_one_of_dalys_formula(between_h: int, interval_steps: int, stall_s: int, start_s: int) -> None:
    expected = expected_share(between_h * HOUR_S, interval_steps * 10.0, stall_s, start_s)
    # About 300 failures; the waits of the backoff, of failures in a row, are not in the formula.
    assert simulated(between_h * HOUR_S, interval_steps, stall_s, start_s, seconds=300 * between_h * HOUR_S).share == pytest.approx(expected, abs=0.015)


@pytest.mark.full
def test_the_best_interval_is_the_one_of_youngs_formula() -> None:
    between_s, stall_s = 3 * HOUR_S, 30.0
    best = best_interval_s(between_s, stall_s)
    assert best == pytest.approx(math.sqrt(2 * 30 * 10_800))
    shares = {factor: simulated(between_s, round(factor * best / 10), stall_s, seconds=4000 * HOUR_S).share for factor in (0.2, 1.0, 5.0)}
    assert shares[1.0] > shares[0.2] + 0.02 and shares[1.0] > shares[5.0] + 0.02


def test_all_of_the_time_is_trained_or_lost_to_something() -> None:
    recovery = Recovery({"process": 2.0, "node": 15.0}, 60.0, swap_s=30.0, repair_s=DAY_S)
    run = SimulatedRun(16_384, 10.0, 20, LLAMA3, recovery, [Tier("disk", every(30), 2.0, 30.0, 40.0)])
    week = effective_time(run, 7 * DAY_S)
    assert week.steps * week.step_s + sum(week.lost_s.values()) == pytest.approx(week.seconds)
    assert sum(week.by_cause.values()) == pytest.approx(sum(week.lost_s.values()) - week.lost_s[model.STALL])


def test_published_rates_and_published_recovery_give_about_the_published_share() -> None:
    # Llama 3: more than 90 %. MegaScale: 10 minutes until a fault is diagnosed, 15 until training has caught up, both at most.
    recovery = Recovery({"process": 600.0, "node": 600.0}, 300.0, repair_s=DAY_S, watchdog=WatchdogConfig(min_deadline_s=600.0))
    run = SimulatedRun(16_384, 10.0, 32, LLAMA3, recovery, [Tier("disk", every(60), 2.0, 5.0, 3.0)])
    assert effective_time(run, 7 * DAY_S).share == pytest.approx(0.9, abs=0.05)


def one_failure(at_s: float, run: SimulatedRun, monkeypatch: pytest.MonkeyPatch, kind: Kind, *more_s: float) -> EffectiveTime:
    def moments(self: FailureRates, gpus: int, chosen: random.Random):  # type: ignore[no-untyped-def]
        for moment in (at_s, *more_s, math.inf):
            yield moment, Cause("fault", 1, kind)

    monkeypatch.setattr(FailureRates, "moments", moments)
    return effective_time(run, 1000.0)


def test_a_failure_costs_what_is_worked_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps of 10 s, a save after each 5 that stalls for 2 s and is committed after 8: the second save, of step 10, begins at 102 s. A node dies at 107 s,
    # 3 s into step 11, before it is committed, so the run goes back to step 5: 50 s of steps and 3 of the one in progress are lost.
    recovery = Recovery({"process": 1.0, "node": 15.0}, 60.0, swap_s=30.0)
    run = SimulatedRun(8, 10.0, 1, LLAMA3, recovery, [Tier("disk", every(5), 2.0, 8.0, 4.0)])
    result = one_failure(107.0, run, monkeypatch, "node")
    lost = {name: seconds for name, seconds in result.lost_s.items() if seconds and name != model.STALL}
    assert lost == {model.REPEATED: 53.0, model.DETECTION: 15.0, model.NODE: 30.0, model.START: 60.0, model.LOAD: 4.0}


def test_a_tier_in_memory_is_read_after_the_death_of_a_process_and_not_after_that_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Tier("memory", every(1), 0.0, 0.0, 1.0, frozenset(("process",)))
    run = SimulatedRun(8, 10.0, 1, LLAMA3, Recovery({"process": 1.0, "node": 1.0}, 5.0), [memory, Tier("disk", every(10), 0.0, 0.0, 30.0)])
    died = one_failure(195.0, run, monkeypatch, "process").lost_s
    assert (died[model.REPEATED], died[model.LOAD]) == (5.0, 1.0)
    gone = one_failure(195.0, run, monkeypatch, "node").lost_s
    assert (gone[model.REPEATED], gone[model.LOAD]) == (95.0, 30.0)


def test_a_hang_is_found_after_the_deadline_that_was_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    recovery = Recovery({"process": 1.0, "node": 1.0}, 5.0, watchdog=WatchdogConfig(deadline_factor=8.0, min_deadline_s=20.0))
    run = SimulatedRun(8, 10.0, 1, LLAMA3, recovery, [Tier("disk", every(10), 0.0, 0.0, 0.0)])
    assert one_failure(195.0, run, monkeypatch, "hang").lost_s[model.DETECTION] == 80.0


def test_failures_in_a_row_wait_as_the_backoff_says_and_a_lack_of_spares_as_long_as_a_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimulatedRun(8, 10.0, 1, LLAMA3, Recovery({"process": 1.0, "node": 1.0}, 50.0, repair_s=300.0), [Tier("disk", every(10), 0.0, 0.0, 0.0)])
    # At 195 s the spare takes over; at 206 s, while processes start, none is left until 495 s.
    result = one_failure(195.0, run, monkeypatch, "node", 206.0)
    # The state is that of step 10 at either failure, after that of step 19: no progress, so the second restart waits for half a second.
    assert result.lost_s[model.BACKOFF] == 0.5
    assert result.lost_s[model.NODE] == pytest.approx(495.0 - 207.5)


def test_rates_are_those_that_are_published() -> None:
    assert sum(cause.count for cause in LLAMA3.causes) == 419
    assert LLAMA3.between_failures_s(16_384) / HOUR_S == pytest.approx(54 * 24 / 419)


def test_moments_of_failures_have_the_published_mean() -> None:
    moments = LLAMA3.moments(16_384, random.Random(1))
    *_, (last_s, _) = [next(moments) for _ in range(4000)]
    assert last_s / 4000 == pytest.approx(LLAMA3.between_failures_s(16_384), rel=0.05)


def test_without_a_tier_that_survives_everything_nothing_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimulatedRun(8, 10.0, 1, LLAMA3, Recovery({"process": 1.0, "node": 1.0}, 5.0), [Tier("memory", every(1), 0, 0, 0, frozenset(("process",)))])
    with pytest.raises(ValueError, match="no tier of checkpoints survives"):
        one_failure(195.0, run, monkeypatch, "node")
