"""Real processes are killed at named points, and the results of the run do not change."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from fault_points import every_fault_point
from pod_runs import PodRun, difference, finish

from tandem.runtime.records.journal import COMMITS

REPRESENTATIVE = (
    "trainer_worker:after:train:3",
    pytest.param("rollout_shim:before:rollout:4", marks=pytest.mark.full),
    pytest.param("rollout_worker:after:update_weight:1", marks=pytest.mark.full),
)
DELICATE = (
    "rollout_worker:after:update_weight:1",
    "pod:after:commit_scores:5",
    "pod:before:commit_checkpoint:4",  # The checkpoint exists and is not in the journal.
    "trainer_shim:before:register:2",  # The weight buffers end with it.
    "trainer_worker:before:save:4",  # The checkpoint was not written again after the recovery.
    "trainer_worker:before:inference:5",  # Steps are repeated from the journal, then samples exist without a rollout.
    "pod:after:commit_samples:5",  # The same, after a resume.
    "pod:after:commit_evaluation:0",  # Between the two evaluations of the initial model.
    "trainer_shim:after:train:3,pod:before:record_event:3",  # The pod dies during the recovery.
    "trainer_worker:before:measure:0,pod:before:commit_samples:1",  # The run goes on without a prediction of its time, which the resume makes.
    "rollout_worker:before:rollout:2,rollout_shim:after:start_engine:2,trainer_worker:after:onload:2",
)
TERMINATED = (
    "rollout_shim:after:stop_worker:1",
    "rollout_shim:before:start_engine:2",
    "rollout_worker:after:rollout:3",
    "trainer_worker:before:onload:4",
    "trainer_shim:before:register:5",
    "pod:before:terminate_engine:2",
    "pod:after:start_engine:3",
)
RANDOM_SIXTY = random.Random(20).sample(list(every_fault_point()), 60)


def survive(run: PodRun, *faults: str, settings: tuple[str, ...] = ()) -> None:
    """Trains with ``faults``, resumes as often as the pod was killed, and checks that every fault occurred."""
    killed = sum(fault.startswith("pod:") for fault in faults)
    done = run.train("--fault", ",".join(faults), *settings)
    for _ in range(killed):
        assert done.returncode == -9, done.stdout + done.stderr
        done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in (run.directory / "faults").iterdir()) == sorted(f.replace(":", "-") for f in faults)


def assert_lost_nothing(run: PodRun, undisturbed: PodRun) -> None:
    assert difference(run, undisturbed) == []
    assert [row["mismatch_kl"] for row in run.rows()] == [0.0] * 6
    assert run.left_behind() == []


def assert_recovered(run: PodRun, fault: str) -> None:
    role = fault.split(":")[0]
    if role == "pod":
        assert len(run.events("resume")) == 1
    else:
        assert [f"{event.detail['role']}_{event.detail['part']}" for event in run.events("recovery")] == [role]


@pytest.mark.parametrize("fault", REPRESENTATIVE)
def test_kill_at_a_point_and_the_run_is_the_same(fault: str, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    survive(run, fault)
    assert_recovered(run, fault)
    assert_lost_nothing(run, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("faults", DELICATE)
def test_kill_at_a_delicate_point_and_the_run_is_the_same(faults: str, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    survive(run, *faults.split(","))
    assert_lost_nothing(run, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("fault", [str(fault) for fault in RANDOM_SIXTY])
def test_kill_at_a_random_point_and_the_run_is_the_same(fault: str, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    survive(run, fault)
    assert_recovered(run, fault)
    assert_lost_nothing(run, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("fault", TERMINATED)
def test_kill_where_the_engine_is_terminated_between_steps_and_the_run_is_the_same(
    fault: str, undisturbed: PodRun, tmp_path: Path
) -> None:
    run = PodRun(tmp_path)
    survive(run, fault, settings=("--residents.plan=terminate",))
    assert_recovered(run, fault)
    assert_lost_nothing(run, undisturbed)


@pytest.mark.full
def test_kill_of_the_fork_server_ends_the_workers_of_both_sidecars_and_the_run_is_the_same(undisturbed: PodRun, tmp_path: Path) -> None:
    """It happens twice: the servers that the sidecars have afterwards are their own."""
    run = PodRun(tmp_path)
    command = run.begin("train", str(run.recipe), f"--run.directory={tmp_path}", "--run.name=run")
    for steps, count in ((1, 1), (3, 2)):
        ends = time.monotonic() + 200
        while not (run.directory / "metrics.jsonl").exists() or len((run.directory / "metrics.jsonl").read_text().splitlines()) < steps:
            assert command.poll() is None and time.monotonic() < ends
            time.sleep(0.01)
        servers = [number for number, line in run.processes().items() if "runtime.process.fork_server" in line]
        assert len(servers) == count
        for server in servers:
            os.kill(server, signal.SIGKILL)
    done = finish(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {event.detail["part"] for event in run.events("recovery")} == {"worker"} and len(run.events("recovery")) >= 2
    assert_lost_nothing(run, undisturbed)


@pytest.mark.full
def test_kill_of_a_tensor_rank_of_the_engine_and_the_run_is_the_same(tmp_path: Path) -> None:
    """Rank 0 is the sidecar's worker, which starts the others."""
    settings = ("--rollout.engine.tensor_parallel_size=2", "--model.create.num_key_value_heads=2", "--machine.threads=2")
    quiet, run = PodRun(tmp_path, name="quiet"), PodRun(tmp_path, name="run")
    done = quiet.train(*settings)
    assert done.returncode == 0, done.stderr
    command = run.begin("train", str(run.recipe), f"--run.directory={tmp_path}", "--run.name=run", *settings)
    ends = time.monotonic() + 200
    while not (run.directory / "metrics.jsonl").exists() or len((run.directory / "metrics.jsonl").read_text().splitlines()) < 2:
        assert command.poll() is None and time.monotonic() < ends
        time.sleep(0.01)
    (process,) = [number for number, line in run.processes().items() if "tandem.engine.executor.rank_worker" in line]
    os.kill(process, signal.SIGKILL)
    done = finish(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [event.detail["role"] for event in run.events("recovery")] == ["rollout"]
    assert difference(run, quiet) == [] and run.left_behind() == []


def test_undisturbed_run_learns_in_every_step_so_that_equal_bits_mean_something(undisturbed: PodRun) -> None:
    rows = undisturbed.rows()
    assert [row["step"] for row in rows] == list(range(6))
    assert all(row["actor/grad_norm"] > 0 and row["kl"] >= 0 and row["mismatch_kl"] == 0.0 for row in rows)
    assert len({row["actor/grad_norm"] for row in rows}) == 6
    assert undisturbed.left_behind() == []
    assert undisturbed.events("recovery") == undisturbed.events("resume") == []


def test_fault_points_of_the_pod_are_exactly_the_transitions_and_commits_of_the_run(undisturbed: PodRun) -> None:
    listed = {(fault.name, fault.step) for fault in every_fault_point() if fault.role == "pod"}
    seen = {(transition.state, transition.step) for transition in undisturbed.transitions()}
    assert {point for point in listed if point[0] not in COMMITS} == seen
    assert {name for name, _ in listed} & set(COMMITS) == set(COMMITS) - {"record_event"}, "a run without a fault records no event"
