"""Slurm on machines of their own (network namespaces, each with its own shared memory) loses one of a run, also the first: it ends every process of the job and
begins it again on the machines that are left. There keepers find what they had in ``checkpoint.memory_directory``, so that nothing is read of the folder of the
run, which ends with the bits of one that was not disturbed."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from etcd_server import WHY_SKIPPED as WHY_NO_ETCD
from etcd_server import program
from launched_runs import LaunchedRuns, left_behind
from network import Network, why_not
from pod_runs import RECIPE, PodRun, difference
from slurm_cluster import WHY_SKIPPED, SlurmCluster, is_installed
from slurm_machines import inside
from test_cluster_slurm_first_node import of_job_on

from tandem.runtime.records.checkpoint_tiers import tiers_of

pytestmark = pytest.mark.full
FOLDER = "/dev/shm/tandem"
STEPS = ("--run.max_steps=40", "--evaluation.every_steps=40", "--evaluation.target_accuracy=1.0", "--checkpoint.every_steps=1000")
MEMORY = ("--checkpoint.memory_every_steps=1", f"--checkpoint.memory_directory={FOLDER}")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Network, SlurmCluster]]:
    if why := (WHY_SKIPPED if not is_installed() else WHY_NO_ETCD if program() is None else why_not()):
        pytest.skip(why)
    network = Network()
    hosts = [network.add(f"n{number}", number) for number in (1, 2, 3)]
    for host in hosts:
        # More than the preflight asks for.
        host.shm_mib = 200
    address = hosts[0].address.rpartition(".")[0] + ".254"
    cluster = SlurmCluster(
        tmp_path / "slurm", nodes=3, address=address, addresses=[host.address for host in hosts], inside=[partial(inside, host) for host in hosts]
    )
    try:
        yield network, cluster.start()
    finally:
        cluster.clear()
        cluster.stop()
        network.close()


def daemon_of(cluster: SlurmCluster, node: str) -> "subprocess.Popen[bytes]":
    return next(process for process in cluster.processes if process.args[-2:] == ["-N", node])  # type: ignore[index]


def kept_on(cluster: SlurmCluster, node: str) -> list[str]:
    """Returns what is in the folder of the keepers on a machine."""
    folder = Path(f"/proc/{daemon_of(cluster, node).pid}/root{FOLDER}")
    return [str(path.relative_to(folder)) for path in folder.rglob("*")]


@pytest.mark.parametrize(("lost", "ranks"), [("n1", 1), ("n1", 2), ("n2", 2)])
def test_a_lost_node_never_needs_the_folder(machines: tuple[Network, SlurmCluster], lost: str, ranks: int, tmp_path: Path) -> None:
    _, cluster = machines
    runs = LaunchedRuns(tmp_path, cluster.environment)
    trains = (f"--parallel.data={ranks}",)
    on = ("--on", "slurm", "--run.name=two", "--slurm.nodes=2", "--pods.min_count=2", f"--pods.trainer_count={ranks}")
    runs.tandem("train", RECIPE, *on, *MEMORY, *trains, *STEPS)
    until = time.monotonic() + 240
    while not [tier for tier in tiers_of(runs.directory("two")) if tier.tier == "memory" and tier.step >= 7 and len(tier.where) >= 2]:
        assert time.monotonic() < until, runs.output("two")
        time.sleep(0.05)
    # The machine has lost its power: its slurmd, and all of the job there.
    daemon = daemon_of(cluster, lost)
    for pid in (daemon.pid, *of_job_on(cluster, lost)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 180
    while "Restarts=1" not in (said := cluster.ask("scontrol", "show", "job")):
        assert time.monotonic() < until, (runs.output("two"), said)
        time.sleep(0.5)
    runs.tandem("train", RECIPE, "--run.name=one", *trains, *STEPS)
    assert runs.wait_for_state("two", "finished", "failed", "stopped")["state"] == "finished", runs.output("two")
    two, one = (PodRun(tmp_path / "runs", name=name) for name in ("two", "one"))
    event = two.loaded()[0]
    assert event["tier"] == "memory" and event["step"] >= 7 and event["read_bytes"]["folder"] == 0, (event, runs.output("two"))
    assert difference(two, one) == []
    assert left_behind(tmp_path, "memory.keeper") == [] and not [kept for node in {"n1", "n2", "n3"} - {lost} for kept in kept_on(cluster, node)]
