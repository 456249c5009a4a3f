"""A pod of a run with several, or its worker, is killed at every kind of point of a rollout and of an update: the bits of one pod."""

from pathlib import Path

import pytest
from pod_runs import PodRun, difference, train_two_pods


@pytest.mark.full
@pytest.mark.parametrize(
    "fault, part",
    [
        ("pod1_rollout_worker:before:rollout:3", "worker"), ("pod1_rollout_worker:after:rollout:3", "worker"),
        ("pod1_rollout_shim:before:rollout:3", "pod"), ("pod1_rollout_shim:after:rollout:3", "pod"), ("rollout_shim:after:rollout:3", "pod"),
        ("pod1_rollout_shim:after:rollout:4", "pod"), ("pod1_rollout_shim:before:receive_weights:2", "pod"),
        ("pod1_rollout_shim:after:receive_weights:2", "pod"),
    ],
)  # fmt: skip
def test_kill_a_pod_or_its_worker_and_no_bit_changes_and_nothing_is_lost(fault: str, part: str, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    train_two_pods(run, "--fault", fault)
    assert difference(run, undisturbed) == []
    (event,) = run.events("recovery")
    assert (event.detail["role"], event.detail["part"]) == ("rollout", part), event
    # The trainer was not disturbed, and a pod's death is not that of the rollout.
    states = [transition.state for transition in run.transitions()]
    assert states.count("start") == 1 and states.count("start_engine") == 1
    # The pod that was lost came back: it has the weights of the last step.
    for pod in [run.directory / "pods" / "1"] if "pod1" in fault else []:
        assert (pod / "faults").is_dir() and "weights of step 6" in (pod / "logs" / "rollout_shim.log").read_text()
