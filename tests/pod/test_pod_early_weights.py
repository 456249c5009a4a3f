"""Pods that read weights while they are registered, in whole runs: the bits of one pod, whoever is killed meanwhile."""

from pathlib import Path

import pytest
from pod_runs import PodRun, difference, train_two_pods

pytestmark = pytest.mark.full


def early_bytes(run: PodRun) -> list[int]:
    """Returns the bytes that had come before the publication, of every update of weights."""
    return [int(each.detail.get("early_bytes", 0)) for each in run.transitions() if each.sidecar == "rollout" and each.state == "update_weight"]


def test_a_second_pod_that_reads_while_weights_are_registered_gives_the_bits_of_one_that_does_not_and_of_one_pod(undisturbed: PodRun, tmp_path: Path) -> None:
    on, off = PodRun(tmp_path / "on"), PodRun(tmp_path / "off")
    train_two_pods(on, "--pods.pipeline=always")
    train_two_pods(off)
    assert difference(on, undisturbed) == difference(off, undisturbed) == []
    assert sum(early_bytes(on)) > 0 and not any(early_bytes(off))
    for pod in (".", "pods/1"):
        logs = [(run.directory / pod / "logs" / "rollout_worker.log").read_text() for run in (on, off)]
        assert ["are read beside those in use" in log for log in logs] == [True, False]
    log = (off.directory / "pods" / "1" / "logs" / "rollout_shim.log").read_text()
    assert "while they are registered" not in log and "while they are registered" in (on.directory / "pods" / "1" / "logs" / "rollout_shim.log").read_text()


@pytest.mark.parametrize(
    "fault",
    [
        "pod1_rollout_shim:before:receive_early:2", "pod1_rollout_shim:after:receive_early:2", "trainer_worker:before:register:2",
        "trainer_shim:before:register:2",
    ],
)
def test_kill_a_pod_that_reads_early_or_the_trainer_that_registers_and_no_bit_changes(fault: str, undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    train_two_pods(run, "--pods.pipeline=always", "--fault", fault)
    assert difference(run, undisturbed) == [] and run.left_behind() == []
    (event,) = run.events("recovery")
    assert event.detail["role"] == ("trainer" if "trainer" in fault else "rollout"), event
    assert len([each for each in early_bytes(run) if each]) >= 2


def test_the_first_of_three_pods_that_send_on_reads_early_and_others_from_it(undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--pods", "3", "--pods.peer_to_peer=true", "--pods.pipeline=always")
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, undisturbed) == [] and run.left_behind() == []
    logs = [(run.directory / "pods" / number / "logs" / "rollout_shim.log").read_text() for number in "12"]
    assert ["while they are registered" in log for log in logs] == [True, False]
