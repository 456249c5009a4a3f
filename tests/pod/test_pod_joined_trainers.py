"""The trainer's ranks on several machines (network namespaces, real etcd), with cuts and kills: the bits of as many ranks in one pod."""

import os
import random
import signal

import pytest
from four_pods import FourPods
from pod_runs import PodRun
from random_faults import KINDS, check_undisturbed

pytestmark = pytest.mark.full
STEPS = 8
SETTINGS = ("--parallel.data=2",)


@pytest.fixture
def trained_by_two(four: FourPods) -> FourPods:
    """Four pods, of which the run's own and one that joined have a rank each."""
    four.settings = (*SETTINGS, "--pods.trainer_count=2")
    return four


def rank_of_joined(four: FourPods) -> tuple[str, int]:
    """Returns the pod that has rank 1, and the process of it."""
    found = [(name, pid) for name, pod in four.pods.items() for pid, line in pod.processes().items() if "tandem.pod.trainer_worker" in line]
    assert len(found) == 1, found
    return found[0]


def test_ranks_on_two_machines_have_the_bits_of_two_in_one_pod(trained_by_two: FourPods, quiet: PodRun) -> None:
    trained_by_two.start()
    trained_by_two.wait_for_step(2)
    rank_of_joined(trained_by_two)
    check_undisturbed(trained_by_two, quiet)
    assert trained_by_two.run.events("recovery") == []


@pytest.mark.parametrize("what", ["rank", "machine"])
def test_a_rank_on_another_machine_or_all_of_that_machine_is_killed(what: str, trained_by_two: FourPods, quiet: PodRun) -> None:
    four = trained_by_two
    four.start()
    four.wait_for_step(2)
    name, rank = rank_of_joined(four)
    for pid in [rank] if what == "rank" else four.pods[name].processes():
        os.kill(pid, signal.SIGKILL)
    check_undisturbed(four, quiet)
    assert any(event.detail["role"] == "trainer" for event in four.run.events("recovery"))


@pytest.mark.parametrize("kind", ["unplug", "etcd", "controller"])
def test_the_machine_of_a_rank_is_cut_off(kind: str, trained_by_two: FourPods, quiet: PodRun) -> None:
    four = trained_by_two
    four.start()
    four.wait_for_step(2)
    name, _ = rank_of_joined(four)
    # It is the one that the fault would choose.
    only = random.Random()
    only.choice = lambda seq: name  # type: ignore[method-assign,assignment]
    fault = {"unplug": "pull a pod's wire", "etcd": "cut - etcd", "controller": "cut pod - controller"}[kind]
    KINDS[fault](four, only, 8.0)
    check_undisturbed(four, quiet)


def test_a_run_is_killed_and_resumed_while_ranks_are_elsewhere(trained_by_two: FourPods, quiet: PodRun) -> None:
    four = trained_by_two
    four.start()
    four.wait_for_step(3)
    for pid in four.run.processes():
        os.kill(pid, signal.SIGKILL)
    check_undisturbed(four, quiet)


def test_a_trainer_pod_that_leaves_costs_a_restart_and_no_bit(trained_by_two: FourPods, quiet: PodRun) -> None:
    four = trained_by_two
    four.start()
    four.wait_for_step(2)
    name, _ = rank_of_joined(four)
    four.commands[name].terminate()
    check_undisturbed(four, quiet)
    assert {"left", "joined"} <= {key for event in four.run.events("membership") for key in event.detail}


def test_a_pod_without_the_folder_of_the_run_does_not_train_and_the_run_says_so(trained_by_two: FourPods) -> None:
    four = trained_by_two
    # Its own file system hides the run's from the pods.
    for host in four.hosts.values():
        host.hidden = str(four.disks["run"])
    four.settings = (*four.settings, "--pods.join_timeout_s=20")
    four.start()
    four.commands["run"].wait(240)
    assert four.commands["run"].returncode == 1
    assert four.commands["run"].stderr is not None
    (line,) = four.commands["run"].stderr.read().splitlines()
    assert f"p1 does not have the run's folder '{four.run.directory}' under this path" in line
    assert "1 of pods.trainer_count 2 pods that can train are there after pods.join_timeout_s (20 s)" in line
