"""When Slurm loses the first node of a heterogeneous job, it replaces that one in the first part alone, and the run goes on with the same bits."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from launched_runs import LaunchedRuns
from pod_runs import RECIPE, PodRun
from slurm_cluster import SlurmCluster
from slurm_parts import KINDS, LONG, equal_to_one, parts

pytestmark = pytest.mark.full
__all__ = ["parts"]


def test_when_slurm_loses_the_first_node_the_run_goes_on_elsewhere_with_the_nodes_that_the_other_part_has_kept(
    parts: tuple[SlurmCluster, LaunchedRuns]
) -> None:
    cluster, runs = parts
    runs.tandem("train", RECIPE, *KINDS, "--run.name=parts", *LONG)
    runs.wait_for_step("parts", 7)
    # Not by the command, which takes longer than the rest of the run on a busy machine.
    (lost,) = [nodes for part, nodes in running(cluster) if part.endswith("+0")]
    # The daemon of that node, and all of the job there.
    for pid in (cluster.daemon(lost).pid, *of_job_on(cluster, lost)):
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
