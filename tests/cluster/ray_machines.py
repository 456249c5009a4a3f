"""A Ray cluster that exists, whose nodes are machines of their own: network namespaces, each with its own shared memory and folder for temporary files."""

import importlib.util
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import WHY_SKIPPED, program
from launched_runs import LaunchedRuns
from network import Network, why_not
from pod_runs import RECIPE
from ray_cluster import RayCluster

marks = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed, so runs on Ray are NOT tested"),
    pytest.mark.skipif(program() is None, reason=WHY_SKIPPED),
]
LONG = ("--run.max_steps=60", "--evaluation.target_accuracy=1.0", "--evaluation.every_steps=60", "--checkpoint.every_steps=5")
SHORT = ("--pods.min_count=2", "--pods.heartbeat_timeout_s=5")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Network, RayCluster, LaunchedRuns]]:
    """A head at this machine's end of a bridge, two nodes behind it, and the command with the cluster's token."""
    if why := why_not():
        pytest.skip(why)
    network = Network()
    cluster = None
    try:
        hosts = [network.add(f"m{number}", number) for number in (1, 2)]
        cluster = RayCluster(hosts[0].address.rpartition(".")[0] + ".254").start()
        for host in hosts:
            host.hidden, host.shm_mib = str(tmp_path / "disk"), 200
            Path(host.hidden).mkdir(exist_ok=True)
            # A pod's files are on the node's own disk.
            cluster.add(host.name, host=host.address, inside=host.inside, environment={"TMPDIR": host.hidden})
        for host in hosts:
            cluster.wait_for(host.name)
        yield network, cluster, LaunchedRuns(tmp_path, cluster.environment)
    finally:
        if cluster is not None:
            cluster.stop()
        network.close()


def wait_for_room(runs: LaunchedRuns, address: str, nodes: int) -> None:
    """Waits until as many nodes have joined the cluster."""
    until = time.monotonic() + 240
    while True:
        asking = runs.begin("train", RECIPE, "--on", "ray", "--dry-run", f"--ray.address={address}", "--ray.nodes=1")
        out, error = asking.communicate(timeout=200)
        if f"has room for {nodes} " in out:
            return
        assert time.monotonic() < until, out + error


def ends(runs: LaunchedRuns, name: str) -> None:
    assert runs.wait_for_state(name, "finished", "failed", "stopped")["state"] == "finished", runs.output(name)


def host_of(network: Network, runs: LaunchedRuns, name: str, role: str) -> str:
    """Returns the machine on which a role of the run is."""
    until = time.monotonic() + 120
    while (node := dict(re.findall(r"([\w-]+) on (td[\w-]+)", runs.status(name)["where"])).get(role)) is None:
        assert time.monotonic() < until, runs.status(name)
    return next(short for short, host in network.hosts.items() if host.name == node)
