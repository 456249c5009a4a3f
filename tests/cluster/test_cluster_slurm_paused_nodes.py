"""A run over machines of a real Slurm loses no bit when one of them stands still until Slurm takes it for dead, and then goes on."""

import pytest
from slurm_machines import SlurmMachines, machines

pytestmark = pytest.mark.full
__all__ = ["machines"]


@pytest.mark.parametrize("place", [0, 2], ids=["the controller", "a pod"])
def test_a_node_that_stands_still_takes_no_bit_with_it(machines: SlurmMachines, place: int) -> None:
    machines.begin("paused")
    machines.host(machines.nodes()[place]).pause(25)
    machines.equal_to_local("paused")
