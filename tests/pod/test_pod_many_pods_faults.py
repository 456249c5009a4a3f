"""A run with several pods in which something dies outside of a rollout, a pod is stopped, or the rollout is one step ahead: the bits of one pod."""

import os
import signal
import time
from pathlib import Path

import pytest
from pod_runs import PodRun, difference, finish, train_two_pods


@pytest.mark.full
@pytest.mark.parametrize(
    "fault",
    ["pod1_rollout_worker:before:start_engine:0", "pod1_rollout_worker:after:update_weight:2", "trainer_shim:after:register:2", "trainer_worker:after:train:3"],
)
def test_kill_outside_a_rollout_and_no_bit_changes(fault: str, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    train_two_pods(run, "--fault", fault, "--residents.plan=terminate")
    assert difference(run, undisturbed) == [] and run.events("recovery")


@pytest.mark.full
def test_a_pod_that_is_stopped_is_left_out_and_its_groups_are_drawn_by_the_other(undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    # Its worker waits in its third rollout until the whole pod is stopped.
    settings = ["--pods=2", "--watchdog.min_deadline_s=3", "--fault", "pod1_rollout_worker:stall:rollout:3"]
    process = run.begin("train", str(run.recipe), f"--run.directory={run.parent}", "--run.name=run", *settings)
    marker, ends = run.directory / "pods" / "1" / "faults" / "pod1_rollout_worker-stall-rollout-3", time.monotonic() + 240
    while not marker.exists() and time.monotonic() < ends:
        time.sleep(0.02)
    stopped = [pid for pid, line in run.processes().items() if f"{run.directory}/pods/1" in line]
    assert len(stopped) == 2, "the shim and its worker"
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    done = finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, undisturbed) == [] and run.left_behind() == []
    # On a loaded machine the other pod may be slow as well.
    events = [event.detail for event in run.events("recovery")]
    assert any((event["part"], event["pod"]) == ("pod", 1) and event["groups"] > 0 and "within" in event["reason"] for event in events), events
    assert not any(Path(f"/proc/{pid}").exists() for pid in stopped)


@pytest.mark.full
@pytest.mark.parametrize("faults", ["", "pod1_rollout_shim:after:rollout:3"])
def test_two_pods_one_step_off_give_the_bits_of_one(faults: str, tmp_path: Path) -> None:
    one_off = ("--rollout.max_staleness=1", "--algorithm.old_logprobs=rollout")
    alone, run = PodRun(tmp_path / "alone"), PodRun(tmp_path / "run")
    done = alone.train(*one_off)
    assert done.returncode == 0, done.stdout + done.stderr
    train_two_pods(run, *one_off, *(["--fault", faults] if faults else []))
    assert difference(run, alone) == []
    assert len(run.events("recovery")) == (1 if faults else 0)
