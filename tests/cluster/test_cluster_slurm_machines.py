"""Slurm on machines of their own (network namespaces, each with its own shared memory): addresses, and the loss of one that has a rank of the trainer."""

import pytest
from pod_runs import RECIPE
from slurm_machines import LONG, SlurmMachines, machines

pytestmark = pytest.mark.full
__all__ = ["machines"]


def test_a_run_over_two_machines_has_the_bits_of_one_also_when_slurm_loses_a_machine_and_has_it_again(machines: SlurmMachines) -> None:
    mesh = ("--parallel.data=2",)
    machines.runs.tandem("train", RECIPE, "--on", "slurm", "--run.name=two", "--slurm.nodes=2", "--trainer-pods", "2", *LONG, *mesh)
    machines.runs.wait_for_step("two", 7)
    lost, said = machines.nodes()[1], machines.runs.output("two")
    assert f"pod {lost} joined run 'two' at {machines.host(lost).address}:" in said and f"pod {lost} trains with rank 1" in said
    machines.host(lost).plug(False)
    machines.wait_for_second_life("two")
    machines.host(lost).plug(True)
    run = machines.equal_to_local("two", *mesh)
    assert run.events("resume")[-1].detail["step"] >= 5
