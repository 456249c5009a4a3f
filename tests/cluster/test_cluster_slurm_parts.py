"""A heterogeneous job of a real Slurm: the trainer's node has GPUs, as Slurm counts them, and the nodes that draw samples have none. It has the bits of one
pod, also when it is queued again and when Slurm loses its first node, which it then replaces in that part alone."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched_runs import LaunchedRuns, left_behind
from pod_runs import RECIPE, PodRun, difference
from slurm_cluster import WHY_SKIPPED, SlurmCluster, is_installed

pytestmark = pytest.mark.full
ROLLOUT = "--slurm.rollout={nodes: 2, cpus_per_task: 1, exclude: 'n[1-2]'}"
KINDS = ("--on", "slurm", "--slurm.gpus_per_node=2", ROLLOUT, "--pods.min_count=3", "--machine.device=cpu")
LONG = ("--run.max_steps=40", "--evaluation.target_accuracy=1.0", "--evaluation.every_steps=40", "--checkpoint.every_steps=5")


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[tuple[SlurmCluster, LaunchedRuns]]:
    """Two nodes with GPUs and two without."""
    if not is_installed():
        pytest.skip(WHY_SKIPPED)
    cluster = SlurmCluster(tmp_path / "slurm", nodes=4, gpus=(2, 2, 0, 0)).start()
    try:
        yield cluster, LaunchedRuns(tmp_path, cluster.environment)
    finally:
        cluster.clear()
        cluster.stop()


def equal_to_one(runs: LaunchedRuns, name: str, *settings: str) -> None:
    runs.tandem("train", RECIPE, "--run.name=one", *settings)
    assert runs.wait_for_state(name, "finished", "failed", "stopped")["state"] == "finished", runs.output(name)
    many, one = (PodRun(runs.folder / "runs", name=each) for each in (name, "one"))
    assert difference(many, one) == []


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
    where = runs.status("parts")["where"]
    first, *others = re.findall(r"n\[?[\d-]+\]?", where.partition(" on ")[2])
    assert first in ("n1", "n2") and others, where
    job = where.split()[1]
    assert cluster.ask("squeue", "-h", "-o", "%i %T").split() == [f"{job}+0", "RUNNING", f"{job}+1", "RUNNING"]
    cluster.ask("scontrol", "requeue", job)
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


def test_when_slurm_loses_the_first_node_the_run_goes_on_elsewhere_with_the_nodes_that_the_other_part_has_kept(
    parts: tuple[SlurmCluster, LaunchedRuns]
) -> None:
    cluster, runs = parts
    runs.tandem("train", RECIPE, *KINDS, "--run.name=parts", *LONG)
    runs.wait_for_step("parts", 7)
    # Not by the command, which takes longer than the rest of the run on a busy machine.
    (lost,) = [nodes for part, nodes in running(cluster) if part.endswith("+0")]
    # The daemon of that node, and all of the job there.
    (daemon,) = [process for process in cluster.processes if process.args[-1] == lost]  # type: ignore[index]
    for pid in (daemon.pid, *of_job_on(cluster, lost)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    ends = time.monotonic() + 180
    while not [nodes for part, nodes in running(cluster) if part.endswith("+0") and nodes != lost]:
        assert time.monotonic() < ends, (running(cluster), runs.output("parts"))
        time.sleep(0.5)
    assert runs.status("parts")["where"].endswith("n[3-4]")
    equal_to_one(runs, "parts", *LONG)
    assert PodRun(runs.folder / "runs", name="parts").events("resume")[-1].detail["step"] >= 5


def running(cluster: SlurmCluster) -> list[list[str]]:
    """Returns each part of a job that runs, such as 7+0, with its nodes."""
    return [line.split() for line in cluster.ask("squeue", "-h", "-t", "RUNNING", "-o", "%i %N").splitlines()]


def of_job_on(cluster: SlurmCluster, node: str) -> list[int]:
    """Returns the processes of jobs on ``node``, those of Slurm that watch them first."""
    watching, own = set[int](), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={cluster.folder}/slurm.conf".encode()} <= set(words):
                own.append(int(path.parent.name))
                parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
                if b"slurmstepd" in Path(f"/proc/{parent}/cmdline").read_bytes():
                    watching.add(parent)
    assert watching and own
    return [*watching, *own]
