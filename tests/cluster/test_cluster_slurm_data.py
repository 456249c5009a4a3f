"""A run on data over machines of their own under a real Slurm: its script and its bits."""

import pytest
from runs_on_data import MESH, WATCHED, assert_equal_to_local, assert_watched, ends, write_recipe
from slurm_machines import SlurmMachines, machines

pytestmark = pytest.mark.full
__all__ = ["machines"]


def test_a_run_on_data_over_two_machines_has_the_bits_of_one(machines: SlurmMachines) -> None:
    recipe = write_recipe(machines.runs, 200)
    printed = machines.runs.tandem("train", recipe, "--on", "slurm", "--slurm.nodes=2", *MESH, "--dry-run")
    assert "#SBATCH --nodes=2" in printed and not (machines.runs.folder / "runs").exists()
    machines.runs.tandem("train", recipe, "--on", "slurm", "--run.name=two", "--slurm.nodes=2", *MESH, *WATCHED)
    ends(machines.runs, "two")
    assert_watched(machines.runs, "two", "n2")
    assert_equal_to_local(machines.runs, "two", recipe)
    assert "trains with rank 1" in machines.runs.output("two")


def test_the_stages_of_a_replica_on_two_machines_have_the_bits_of_one(machines: SlurmMachines) -> None:
    recipe, stages = write_recipe(machines.runs, 30), ("--parallel.data=1", "--parallel.pipeline=2")
    machines.runs.tandem("train", recipe, "--on", "slurm", "--run.name=stages", "--slurm.nodes=2", *stages)
    ends(machines.runs, "stages")
    assert_equal_to_local(machines.runs, "stages", recipe, *stages)
    assert "trains with rank 1" in machines.runs.output("stages")
