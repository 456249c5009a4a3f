"""What the nodes of a real Slurm keep of a run's checkpoints, in their memory and on their disks, when its job is cancelled."""

import json
from pathlib import Path

import pytest
from launched_runs import LaunchedRuns
from network import Network
from runs_on_data import MESH, assert_equal_to_local, ends, write_recipe
from slurm_cluster import SlurmCluster
from test_cluster_slurm_tiers import kept_on, machines

pytestmark = pytest.mark.full
__all__ = ["machines"]
DISK = "/dev/shm/tandem/disk"
"""A folder that each of the machines has for itself, below that of the keepers."""
KEPT = (
    "--checkpoint.memory_every_steps=1", "--checkpoint.memory_directory=/dev/shm/tandem", f"--checkpoint.local_directory={DISK}",
    "--checkpoint.local_every_steps=5", "--checkpoint.every_steps=1000",
)  # fmt: skip
ON = ("--on", "slurm", "--slurm.nodes=2", "--cluster.min_speed=0")
STEPS = 2000


def begin(cluster: SlurmCluster, runs: LaunchedRuns) -> tuple[str, str]:
    """Begins a run whose two nodes both keep checkpoints in memory and on their disks. Returns its job and what the command must have left of it."""
    recipe = write_recipe(runs, STEPS)
    runs.tandem("train", recipe, *ON, "--run.name=two", *MESH, *KEPT)
    runs.wait_for_step("two", 40)
    for node in ("n1", "n2"):
        names = kept_on(cluster, node)
        assert any(name.startswith("two/node-") for name in names) and any(name.startswith("disk/two-") for name in names), names
    return str(json.loads((runs.directory("two") / "launch" / "record.json").read_text())["job"]), str(recipe)


def goes_on(runs: LaunchedRuns, recipe: str) -> None:
    """Resumes the run, which is to end soon, and compares it with one that was not disturbed."""
    steps = len(runs.rows("two"))
    runs.tandem("resume", "runs/two", f"--run.max_steps={steps + 20}")
    ends(runs, "two")
    assert_equal_to_local(runs, "two", recipe, f"--run.max_steps={steps + 20}", *KEPT[-1:])


def test_a_run_that_its_user_stops_leaves_no_checkpoint_on_its_nodes(machines: tuple[Network, SlurmCluster], tmp_path: Path) -> None:
    _, cluster = machines
    runs = LaunchedRuns(tmp_path, cluster.environment)
    job, recipe = begin(cluster, runs)
    assert runs.tandem("cancel", "runs/two") == (
        f"asked job {job} to stop after its step, which it saves first; then it removes the checkpoints that its nodes keep\n"
    )
    status = runs.wait_for_state("two", "finished", "failed", "stopped")
    assert status["state"] == "stopped" and status["checkpoint"] == status["steps"], (status, runs.output("two"))
    assert [name for node in ("n1", "n2") for name in kept_on(cluster, node) if "two" in name] == [], runs.output("two")
    goes_on(runs, recipe)


def test_what_a_job_that_was_ended_at_once_has_left_is_removed_by_the_next_job_on_the_node(
    machines: tuple[Network, SlurmCluster], tmp_path: Path
) -> None:
    _, cluster = machines
    runs = LaunchedRuns(tmp_path, cluster.environment)
    job, recipe = begin(cluster, runs)
    assert runs.tandem("cancel", "runs/two", "--now").startswith(f"cancelled job {job}; checkpoints that its nodes keep stay there for 'tandem resume'")
    assert runs.wait_for_state("two", "finished", "failed", "stopped")["state"] == "stopped"
    assert any(name.startswith("two/node-") for name in kept_on(cluster, "n1"))
    # A resume on these nodes goes on from what they keep; the folder has nothing.
    runs.tandem("resume", "runs/two")
    runs.wait_for_output("two", "is loaded from the memory of the nodes")
    runs.wait_for_step("two", len(runs.rows("two")) + 5)
    cluster.ask("scancel", str(json.loads((runs.directory("two") / "launch" / "record.json").read_text())["job"]))
    assert runs.wait_for_state("two", "finished", "failed", "stopped")["state"] == "stopped"
    runs.tandem("train", recipe, *ON, "--run.name=other", "--run.max_steps=12", *MESH, *KEPT)
    ends(runs, "other")
    said = runs.output("other")
    for node in ("n1", "n2"):
        assert f"node {node}: removed the checkpoints in /dev/shm/tandem of '{runs.directory('two')}', which has no job any more" in said
        assert kept_on(cluster, node) in ([], ["disk"]), "the other run has finished"
    goes_on(runs, recipe)
