"""Several rollout workers: the bits of one, every worker has the weights, and a dead one is replaced without the others."""

from pathlib import Path

import pytest
from fake_workers import PROMPTS, FakeWorker, roll_out
from pod_runs import PodRun, difference

from tandem.config.rollout import RolloutConfig
from tandem.pod.rollout_workers import RolloutWorkers
from tandem.rl.rollout.dispatcher import Dispatcher, GroupLoad
from tandem.rl.rollout.past_lengths import PastLengths
from tandem.runtime.rpc.calls import WorkerDied
from tandem.types import FinishReason, Prompt, RunError, Sample, UserError, WeightVersion


def loads(*longest: float, sequences: int = 4) -> list[GroupLoad]:
    return [GroupLoad(sequences, length, sequences * length) for length in longest]


def test_groups_go_to_the_worker_with_the_fewest_outstanding_tokens_longest_first() -> None:
    dispatcher = Dispatcher(loads(10, 70, 20, 50, 40), workers=2, capacity=100)
    # By hand: 70 -> 0; 50 -> 1; 40 -> 1 (50 < 70); 20 -> 0 (70 < 90); 10 -> 0 or 1 (both 90, two groups each): the first.
    assert dispatcher.take(0) == [1, 2, 0] and dispatcher.take(1) == [3, 4]
    assert dispatcher.outstanding_tokens(0) == 4 * 100 and dispatcher.outstanding_tokens(1) == 4 * 90
    assert dispatcher.take(0) == []


def test_groups_of_which_nothing_is_known_are_spread_evenly() -> None:
    dispatcher = Dispatcher(loads(0, 0, 0, 0, 0), workers=2, capacity=100)
    assert dispatcher.take(0) == [0, 2, 4] and dispatcher.take(1) == [1, 3]


def test_a_group_waits_for_a_worker_with_room_and_goes_to_the_one_that_is_free_first() -> None:
    dispatcher = Dispatcher(loads(9, 8, 7, 6), workers=2, capacity=4)
    assert dispatcher.take(0) == [0] and dispatcher.take(1) == [1]
    dispatcher.finish(1, 1)
    assert dispatcher.take(0) == [] and dispatcher.take(1) == [2]
    dispatcher.finish(1, 2)
    dispatcher.finish(0, 0)
    assert not dispatcher.is_done and (dispatcher.take(0), dispatcher.take(1)) == ([], [3])
    dispatcher.finish(1, 3)
    assert dispatcher.is_done


def test_groups_of_a_dead_worker_are_drawn_again_by_others_or_by_the_one_that_replaces_it() -> None:
    dispatcher = Dispatcher(loads(9, 8, 7), workers=2, capacity=8)
    assert dispatcher.take(0) == [0] and dispatcher.take(1) == [1, 2]
    assert dispatcher.lose(1) == [1, 2]
    assert dispatcher.take(0) == [1] and not dispatcher.holds(1)
    dispatcher.rejoin(1)
    assert dispatcher.take(1) == [2]


def test_the_longest_earlier_sample_of_a_prompt_is_expected_and_the_mean_where_there_is_none() -> None:
    past, prompts = PastLengths(), [Prompt(name, "", (1,)) for name in "abc"]
    assert past.expected(prompts) == [0.0, 0.0, 0.0]
    drawn = [Sample(f"0/{name}/{i}", name, i, (1,), (7,) * n, (0.0,) * n, (0.0,) * n, (WeightVersion(0, 0),) * n, FinishReason.STOP, "")
             for name, i, n in (("a", 0, 3), ("a", 1, 9), ("b", 0, 5))]  # fmt: skip
    past.add(drawn)
    assert past.expected(prompts) == [9.0, 5.0, 7.0]


def test_a_worker_that_dies_is_replaced_and_only_its_unfinished_groups_are_drawn_again() -> None:
    first, second, third = FakeWorker(), FakeWorker(dies_at=2), FakeWorker()
    workers = RolloutWorkers([first, second], lambda number: third, 256, 9.0)
    workers.start_engine({"folder": "f"}, {}, lambda _: None)
    workers.update_weight({"version": [1, 4]}, {}, lambda _: None)
    drawn, progress, reply = roll_out(workers)
    assert sorted(each.id for each in drawn) == sorted(f"0/{prompt.id}/{i}" for prompt in PROMPTS for i in range(2))
    (replaced,) = [each for each in progress if "replaced" in each]
    # Of 7 equal groups worker 1 has three, and had finished one.
    assert (replaced["replaced"], replaced["groups"]) == (1, 2) and "died" in replaced["reason"]
    assert third.asked[:2] == ["start_engine", "update_weight"] and first.calls + second.calls + third.calls == 7 + 1
    assert max(each.get("done", 0) for each in progress) == 7 and 0 < reply["busy_share"] <= 1
    assert reply["drafts"] == [21, 56, 35], "the counts of the seven groups that were drawn"


def test_a_death_beyond_the_allowed_restarts_ends_the_rollout() -> None:
    with pytest.raises(WorkerDied, match="a worker died"):
        roll_out(RolloutWorkers([FakeWorker(), FakeWorker(dies_at=1)], lambda number: FakeWorker(), 256, 9.0), restarts_left=0)


def test_a_worker_that_misses_an_update_of_the_weights_is_named() -> None:
    workers = RolloutWorkers([FakeWorker(), FakeWorker(version=(1, 3))], lambda number: FakeWorker(), 256, 9.0)
    with pytest.raises(RunError, match=r"rollout worker 1 holds the weights \(1, 3\) after the update to \(1, 4\)"):
        workers.update_weight({"version": [1, 4]}, {}, lambda _: None)


def test_more_workers_than_prompts_are_refused() -> None:
    with pytest.raises(UserError, match=r"rollout.workers' is 5 and rollout.prompts_per_step is 4.*1 would have nothing to do"):
        RolloutConfig(prompts_per_step=4, workers=5).check()


@pytest.mark.full
def test_two_workers_of_which_one_is_killed_give_the_bits_of_one(undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--rollout.workers=2", "--fault", "rollout_worker1:after:rollout:3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, undisturbed) == [] and run.left_behind() == []
    (event,) = run.events("recovery")
    assert (event.detail["role"], event.detail["part"], event.detail["worker"]) == ("rollout", "worker", 1)
    assert "SIGKILL" in event.detail["reason"] or "kill -9" in event.detail["reason"]
    # The other worker, the trainer and the engine's state were not disturbed.
    states = [transition.state for transition in run.transitions()]
    assert states.count("start_engine") == 1 and states.count("start") == 1


@pytest.mark.full
@pytest.mark.parametrize(
    "fault", ["rollout_worker1:after:update_weight:2", "rollout_worker1:before:start_engine:0", "rollout_shim:after:rollout:4"]
)
def test_a_death_of_one_of_three_workers_outside_its_rollout_changes_no_bit(fault: str, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--rollout.workers=3", "--residents.plan=terminate", "--fault", fault)
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, undisturbed) == [] and run.left_behind() == []
    assert len(run.events("recovery")) == 1
