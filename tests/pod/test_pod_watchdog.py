"""A worker of a run that does nothing any more, while its shim answers: named with the stacks of all parties, replaced, and the curve is the same."""

from pathlib import Path

import pytest
from pod_runs import PodRun, difference

PARTIES = ("the controller", "trainer_shim", "trainer_worker", "rollout_shim", "rollout_worker", "reward-worker-0")


@pytest.mark.full
@pytest.mark.parametrize("fault, call", [("trainer_worker:stall:train:4", "train"), ("rollout_worker:stall:rollout:5", "rollout")])
def test_a_stuck_worker_is_found_by_the_learned_deadline_and_the_run_is_the_same(fault: str, call: str, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--fault", fault, "--watchdog.min_deadline_s=8")
    assert done.returncode == 0, done.stdout + done.stderr
    (recovery,) = run.events("recovery")
    role = fault.partition("_")[0]
    assert (recovery.detail["role"], recovery.detail["part"]) == (role, "worker")
    assert f"the {role} sidecar is stuck in '{call}': no progress for" in recovery.detail["reason"] and "wait the-controller-" in recovery.detail["reason"]
    (path,) = (run.directory / "logs").glob("stacks-*.txt")
    text = path.read_text()
    assert all(f"{party} (process" in text for party in PARTIES), text
    # Who waits for whom: the controller for the sidecar, its shim for the worker.
    first, second = text.splitlines()[:2]
    assert first.startswith(f"the controller waits for the {role} sidecar in '{call}' since ")
    assert second.startswith(f"the {role} shim waits for the {role} worker in '{call}' since ")
    assert "_sleep" in text.split(f"{role}_worker (process")[1].split("(process")[0], "the stack of the stuck worker says where it is"
    assert difference(run, undisturbed) == [] and run.left_behind() == []
