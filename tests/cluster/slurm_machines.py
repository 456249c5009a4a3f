"""A real Slurm whose nodes are machines of their own: network namespaces, each with its own shared memory, folder for temporary files and spool."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from etcd_server import WHY_SKIPPED as WHY_NO_ETCD
from etcd_server import program
from launched_runs import LaunchedRuns
from network import Host, Network, why_not
from pod_runs import RECIPE, PodRun, difference
from slurm_cluster import WHY_SKIPPED, SlurmCluster, is_installed

LONG = ("--run.max_steps=60", "--evaluation.target_accuracy=1.0", "--evaluation.every_steps=60", "--checkpoint.every_steps=5")
ALL = ("--slurm.nodes=3", "--pods.min_count=3", "--pods.heartbeat_timeout_s=5")
"""A run that goes on only with a pod on each of three nodes, so that what is cut off from them does not end it alone."""


@dataclass(frozen=True)
class SlurmMachines:
    """``network``: its hosts have the names of the nodes of ``cluster``."""

    network: Network
    cluster: SlurmCluster
    runs: LaunchedRuns

    def begin(self, name: str, *settings: str) -> None:
        """Begins the main job over three of the nodes, and waits until it has a checkpoint and pods on all of them."""
        # One of several nodes on the same processor is slow for a moment.
        self.runs.tandem("train", RECIPE, "--on", "slurm", f"--run.name={name}", "--cluster.min_speed=0", *ALL, *LONG, *settings)
        self.runs.wait_for_step(name, 12)

    def nodes(self) -> list[str]:
        """Returns the nodes of the job, the first one first; none while it waits."""
        hosts = self.cluster.ask("squeue", "-h", "-t", "RUNNING", "-o", "%N")
        return self.cluster.ask("scontrol", "show", "hostnames", hosts).split() if hosts else []

    def host(self, node: str) -> Host:
        return self.network.hosts[node]

    def wait_for_second_life(self, name: str) -> None:
        """Waits until Slurm has begun the job a second time."""
        until = time.monotonic() + 180
        while "Restarts=1" not in (job := self.cluster.ask("scontrol", "show", "job")):
            assert time.monotonic() < until, (self.runs.output(name), job)
            time.sleep(0.5)

    def equal_to_local(self, name: str, *settings: str) -> PodRun:
        """Returns the run, once it has finished with the bits of the local one."""
        self.runs.tandem("train", RECIPE, "--run.name=local", *LONG, *settings)
        status = self.runs.wait_for_state(name, "finished", "failed", "stopped")
        assert status["state"] == "finished", (status, self.runs.output(name))
        run, local = (PodRun(self.runs.folder / "runs", name=each) for each in (name, "local"))
        assert difference(run, local) == []
        return run


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[SlurmMachines]:
    """Four nodes: one more than a run has, so that Slurm can begin it again elsewhere while the node that was lost still works."""
    if why := (WHY_SKIPPED if not is_installed() else WHY_NO_ETCD if program() is None else why_not()):
        pytest.skip(why)
    network, disk = Network(), tmp_path / "disk"
    disk.mkdir()
    names = [f"n{number}" for number in range(1, 5)]
    hosts = [network.add(name, number) for number, name in enumerate(names, start=1)]
    for host in hosts:
        # More than the preflight asks for.
        host.hidden, host.shm_mib = str(disk), 200
    address = hosts[0].address.rpartition(".")[0] + ".254"
    # A slurmd does not make the folder above its own, and what it finds there is hidden from the others.
    cluster = SlurmCluster(
        tmp_path / "slurm", nodes=len(hosts), address=address, addresses=[host.address for host in hosts], inside=[partial(inside, host) for host in hosts],
        spool=disk,
    )  # fmt: skip
    try:
        # Processes of a job have the environment of the command.
        yield SlurmMachines(network, cluster.start(), LaunchedRuns(tmp_path, {**cluster.environment, "TMPDIR": str(disk)}))
    finally:
        cluster.clear()
        cluster.stop()
        for host in hosts:
            host.signal(9)
        network.close()


def inside(host: Host, *command: str) -> list[str]:
    """Returns the command that runs ``command`` on ``host``. Not by ``ip netns exec``, which hides the cgroups that a slurmd looks at."""
    whole = host.inside(*command)
    return ["nsenter", f"--net=/run/netns/{host.name}", *whole[whole.index("unshare") :]]
