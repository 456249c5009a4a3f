"""A run over machines of a real Slurm loses no bit when one of them is switched off, or its disk is full."""

import signal
import time

import pytest
from slurm_machines import SlurmMachines, machines

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
    if place == 0:
        # The etcd of the run is there: it cannot go on, and does when there is room.
        time.sleep(25)
        machines.host(lost).empty_disk(machines.cluster.daemon(lost).pid)
    machines.equal_to_local("full")
