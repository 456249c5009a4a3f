"""The command of a pod on a node of a real Slurm is killed: the job step starts it again, and gives the node up where it dies again and again."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from data_runs import rows
from runs_on_data import MESH, assert_equal_to_local, ends, write_recipe
from slurm_machines import SlurmMachines, machines

from tandem.runtime.records.journal import Journal

pytestmark = pytest.mark.full
__all__ = ["machines"]
ON = ("--on", "slurm", "--run.name=two", "--slurm.nodes=2", "--cluster.min_speed=0", *MESH)


def command_of_pod(machines: SlurmMachines, node: str) -> int | None:
    """Returns the process ``tandem pod`` on ``node``; ``None`` while there is none."""
    for pid in machines.host(node).processes():
        with contextlib.suppress(OSError):
            if b"\0tandem.cli.main\0pod\0" in (line := Path(f"/proc/{pid}/cmdline").read_bytes()) and b"srun" not in line:
                return pid
    return None


def kill_pod(machines: SlurmMachines, node: str) -> None:
    until = time.monotonic() + 120
    while (pid := command_of_pod(machines, node)) is None:
        assert time.monotonic() < until, machines.runs.output("two")
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)


def test_a_pod_whose_command_is_killed_is_started_again_on_its_node_by_the_same_job(machines: SlurmMachines) -> None:
    recipe = write_recipe(machines.runs, 150)
    machines.runs.tandem("train", recipe, *ON)
    machines.runs.wait_for_step("two", 7)
    kill_pod(machines, machines.nodes()[1])
    ends(machines.runs, "two")
    said = machines.runs.output("two")
    assert "ended (killed by SIGKILL); it starts again in 0 s" in said and said.count("trains with rank 1") == 2
    assert "Restarts=0" in machines.cluster.ask("scontrol", "show", "job")
    with Journal(machines.runs.directory("two") / "journal.sqlite", read_only=True) as journal:
        assert [event.kind for event in journal.events()].count("recovery") == 1
    assert_equal_to_local(machines.runs, "two", recipe)


def test_a_node_whose_pod_dies_again_and_again_is_given_up_and_a_resume_goes_on(machines: SlurmMachines) -> None:
    recipe = write_recipe(machines.runs, 150)
    machines.runs.tandem("train", recipe, *ON, "--pods.join_timeout_s=60")
    machines.runs.wait_for_step("two", 7)
    lost = machines.nodes()[1]
    while "it is given up, and its node is lost to the run" not in (said := machines.runs.output("two")):
        kill_pod(machines, lost)
        time.sleep(0.5)
        assert said.count("killed by SIGKILL") <= 6, said
    status = machines.runs.wait_for_state("two", "finished", "failed", "stopped")
    assert status["state"] == "failed" and "1 of pods.trainer_count 2 pods that can train are there" in status["reason"], status
    assert len(rows(machines.runs.directory("two"))) < 150
    machines.runs.tandem("resume", "runs/two")
    ends(machines.runs, "two")
    assert_equal_to_local(machines.runs, "two", recipe)
