"""A heterogeneous job of a real Slurm: the trainer's node has GPUs, as Slurm counts them, and the nodes that draw samples have none. It has the bits of one
pod, also when it is queued again."""

from pathlib import Path

import pytest
from launched_runs import LaunchedRuns, left_behind
from pod_runs import RECIPE, PodRun
from slurm_cluster import SlurmCluster
from slurm_parts import KINDS, LONG, equal_to_one, parts

pytestmark = pytest.mark.full
__all__ = ["parts"]


def gone(folder: Path) -> list[str]:
    """Returns what is left of the runs; the daemons of Slurm have the folder in their environment too."""
    return left_behind(folder / "runs")


def test_what_a_job_of_two_parts_cannot_have_is_refused_before_anything_is_made(parts: tuple[SlurmCluster, LaunchedRuns]) -> None:
    _, runs = parts

    def refused(rollout: str, *settings: str) -> str:
        return runs.refusal("train", RECIPE, "--on", "slurm", "--run.name=refused", f"--slurm.rollout={{{rollout}}}", *settings)

    assert refused("nodes: 2, gpus_per_node: 4").startswith("'slurm.rollout.gpus_per_node' is '4', and 0 nodes of this cluster have 4 GPUs (the most is 2)")
    assert refused("nodes: 1, partition: smal").startswith("'slurm.rollout.partition' is 'smal', which this cluster does not have; did you mean 'small'?")
    assert refused("nodes: 1, nodelist: n9").startswith("'slurm.rollout.nodelist' has 'n9', which this cluster does not have")
    assert refused("nodes: 4").startswith("slurm.nodes and slurm.rollout.nodes are 5 together, and partition 'main' has 4; lower it")
    assert refused("nodes: 1", "--pods.trainer_count=2", "--parallel.data=2").startswith("'pods.trainer_count' is 2, and 1 pods of the run can train")
    assert refused("nodes: 2", "--slurm.nodes=2", "--pods.trainer_count=2", "--parallel.data=2", "--cluster.spares=1").startswith("'cluster.spares' is 1 with")
    assert refused("nodes: 1, mem: 900G") == "Slurm refused: allocation failure: Requested node configuration is not available"
    (runs.folder / "sweep.yaml").write_text("runs: [{run.seed: 1}]\n")
    assert refused("nodes: 1", "--array", "sweep.yaml").startswith("'slurm.rollout.nodes' is set with --array, and Slurm has no arrays of heterogeneous jobs")
    assert not (runs.folder / "runs").exists()


def test_a_run_whose_trainer_and_rollouts_have_different_nodes_has_the_bits_of_one_pod_also_when_it_is_queued_again(
    parts: tuple[SlurmCluster, LaunchedRuns]
) -> None:
    cluster, runs = parts
    script = runs.tandem("train", RECIPE, *KINDS, "--run.name=parts", "--dry-run", *LONG)
    assert script.count("#SBATCH hetjob") == 1 and script.count("--gpus-per-node=2") == 1
    runs.tandem("train", RECIPE, *KINDS, "--run.name=parts", *LONG)
    runs.wait_for_step("parts", 12)
    # Not by the command, which takes longer than the rest of the run on a busy machine.
    listed = cluster.ask("squeue", "-h", "-o", "%i %T %N").split()
    job = listed[0].partition("+")[0]
    cluster.ask("scontrol", "requeue", job)
    assert listed in ([f"{job}+0", "RUNNING", node, f"{job}+1", "RUNNING", "n[3-4]"] for node in ("n1", "n2"))
    equal_to_one(runs, "parts", *LONG)
    run = PodRun(runs.folder / "runs", name="parts")
    assert [event.detail["step"] for event in run.events("resume")][-1] >= 10
    assert len({event.detail["name"] for event in run.events("membership") if "joined" in event.detail}) == 2
    assert gone(runs.folder) == []


def test_trainer_ranks_are_on_the_nodes_of_the_first_part_alone(parts: tuple[SlurmCluster, LaunchedRuns]) -> None:
    _, runs = parts
    mesh = ("--parallel.data=2",)
    runs.tandem("train", RECIPE, *KINDS, "--run.name=parts", "--slurm.nodes=2", "--pods.trainer_count=2", *mesh)
    runs.tandem("train", RECIPE, "--run.name=one", *mesh)
    assert runs.wait_for_state("parts", "finished", "failed", "stopped")["state"] == "finished", runs.output("parts")
    # Slurm has given the first part the nodes with GPUs.
    assert "pod n2 trains with rank 1" in runs.output("parts"), runs.output("parts")
    assert runs.model("parts") == runs.model("one")
