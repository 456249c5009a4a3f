"""A run over machines of a real Slurm loses no bit when one of them is switched off, or its disk is full."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from slurm_machines import SlurmMachines, machines

from tandem.cluster.etcd_process import LOST_S

pytestmark = pytest.mark.full
__all__ = ["machines"]


@pytest.mark.parametrize("place", [0, 2], ids=["the controller", "a pod"])
def test_a_node_that_is_killed_takes_no_bit_with_it(machines: SlurmMachines, place: int) -> None:
    machines.begin("killed")
    lost = machines.nodes()[place]
    assert machines.host(lost).signal(signal.SIGKILL)
    machines.wait_for_second_life("killed")
    # It starts again as any node does.
    machines.cluster.start_node(lost)
    run = machines.equal_to_local("killed")
    assert run.events("resume")[-1].detail["step"] >= 10


@pytest.mark.parametrize("place", [0, 2], ids=["the controller", "a pod"])
def test_a_node_whose_disk_is_full_takes_no_bit_with_it(machines: SlurmMachines, place: int) -> None:
    machines.begin("full")
    lost = machines.nodes()[place]
    machines.host(lost).fill_disk(machines.cluster.daemon(lost).pid)
    # It stays full. The etcd of the run is on that of the first node, and goes on elsewhere.
    machines.equal_to_local("full")
    assert ("is full: the etcd of the run goes on in" in machines.runs.output("full")) == (place == 0)


def test_an_etcd_that_cannot_run_ends_the_job_with_a_line_and_a_resume_goes_on(machines: SlurmMachines) -> None:
    machines.begin("lost", "--run.max_steps=1000", "--evaluation.every_steps=1000")
    lost = machines.nodes()[0]
    until = time.monotonic() + LOST_S + 60
    while machines.runs.status("lost")["state"] == "running":
        assert time.monotonic() < until, machines.runs.output("lost")
        stop = time.monotonic() + 2
        while time.monotonic() < stop:
            for pid in machines.host(lost).processes():
                with contextlib.suppress(OSError):
                    if b"/etcd\0" in Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"--")[0]:
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
    status = machines.runs.status("lost")
    assert status["state"] == "failed" and "the etcd of the run cannot run on this node: killed by SIGKILL" in status["reason"], status
    assert "tandem: the etcd of the run cannot run on this node" in machines.runs.tandem("logs", "runs/lost")
    steps = status["steps"] + 20
    machines.runs.tandem("resume", "runs/lost", f"--run.max_steps={steps}")
    machines.equal_to_local("lost", f"--run.max_steps={steps}", "--evaluation.every_steps=1000")
