"""A real Slurm of two nodes with GPUs, as Slurm counts them, and two without, and runs over both kinds."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from launched_runs import LaunchedRuns
from pod_runs import RECIPE, PodRun, difference
from slurm_cluster import WHY_SKIPPED, SlurmCluster, is_installed

ROLLOUT = "--slurm.rollout={nodes: 2, cpus_per_task: 1, exclude: 'n[1-2]'}"
KINDS = ("--on", "slurm", "--slurm.gpus_per_node=2", ROLLOUT, "--pods.min_count=3", "--machine.device=cpu")
LONG = ("--run.max_steps=60", "--evaluation.target_accuracy=1.0", "--evaluation.every_steps=40", "--checkpoint.every_steps=5")


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
