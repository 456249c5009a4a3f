"""A run over machines of a real Slurm loses no bit when the network of one is cut, whether that comes back or not."""

import pytest
from slurm_machines import SlurmMachines, machines

pytestmark = pytest.mark.full
__all__ = ["machines"]


@pytest.mark.parametrize("place", [0, 2], ids=["the controller", "a pod"])
def test_a_node_whose_network_is_cut_takes_no_bit_with_it(machines: SlurmMachines, place: int) -> None:
    machines.begin("cut")
    lost = machines.nodes()[place]
    machines.host(lost).plug(False)
    # Slurm takes it for dead and begins the job elsewhere, while its processes still work: a controller among them has the run.
    machines.wait_for_second_life("cut")
    if place == 0:
        machines.runs.wait_for_output("cut", "is in use by process")
    machines.host(lost).plug(True)
    run = machines.equal_to_local("cut")
    assert run.events("resume")[-1].detail["step"] >= 10
