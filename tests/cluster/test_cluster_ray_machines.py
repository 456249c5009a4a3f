"""A Ray cluster that exists, whose nodes are machines of their own (network namespaces, each with its own shared memory and folder for temporary files):
what it cannot run is refused, and a run over it loses no bit when a node's wire is pulled or its disk is full."""

import importlib.util
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import WHY_SKIPPED, program
from launched_runs import TINY, LaunchedRuns
from network import Network, why_not
from pod_runs import RECIPE, PodRun, difference
from ray_cluster import RayCluster

pytestmark = [
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
        found = runs.begin("train", RECIPE, "--on", "ray", "--dry-run", f"--ray.address={address}", "--ray.nodes=1")
        out, error = found.communicate(timeout=200)
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


def test_what_the_cluster_cannot_run_is_refused_and_leaves_nothing(machines: tuple[Network, RayCluster, LaunchedRuns], tmp_path: Path) -> None:
    _, cluster, runs = machines
    on = ("--on", "ray", f"--ray.address={cluster.address}", "--run.name=refused")
    wait_for_room(runs, cluster.address, 2)
    assert runs.refusal("train", RECIPE, *on, "--ray.nodes=3").startswith("'ray.nodes' is 3, and the Ray cluster has room for 2 with 1 cores each; lower it")
    assert runs.refusal("train", RECIPE, *on, "--ray.num_gpus=1").startswith("no node of the Ray cluster has 1 cores, 1 GPUs; lower what section 'ray' asks")
    assert runs.refusal("train", RECIPE, *on, "--ray.resources={spot: 1}").startswith("no node of the Ray cluster has 1 cores, 1 of resource 'spot';")
    other = LaunchedRuns(tmp_path, {**cluster.environment, "RAY_AUTH_TOKEN_PATH": "/dev/null"})
    assert other.refusal("train", RECIPE, *on).startswith(f"Ray at '{cluster.address}' does not let this machine in: ")
    # A node with another version of Tandem.
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import tandem\ntandem.__version__ = '0.0.9'\n")
    cluster.add("old", "--resources={\"old\": 1}", environment={"PYTHONPATH": str(site)})
    wait_for_room_of_old(runs, on)
    assert not (tmp_path / "runs").exists()
    cluster.kill("old")


def wait_for_room_of_old(runs: LaunchedRuns, on: tuple[str, ...]) -> None:
    until = time.monotonic() + 120
    while True:
        said = runs.refusal("train", RECIPE, *on, "--ray.resources={old: 1}")
        if "has Tandem" in said:
            assert said.startswith("node 'old' of the Ray cluster has Tandem 0.0.9, and this machine "), said
            return
        assert time.monotonic() < until, said


@pytest.mark.parametrize("role", ["controller", "ray-1"])
def test_a_node_whose_wire_is_pulled_takes_no_bit_with_it(machines: tuple[Network, RayCluster, LaunchedRuns], role: str, tmp_path: Path) -> None:
    network, cluster, runs = machines
    wait_for_room(runs, cluster.address, 2)
    runs.tandem("train", RECIPE, "--on", "ray", f"--ray.address={cluster.address}", "--run.name=two", "--ray.nodes=2", *SHORT, *LONG)
    chosen = network.hosts[host_of(network, runs, "two", role)]
    runs.wait_for_step("two", 12)
    chosen.plug(False)
    time.sleep(25)
    chosen.plug(True)
    # A raylet that was taken for dead ends; the administrator of the node starts it again.
    cluster.kill(chosen.name)
    cluster.add(chosen.name, host=chosen.address, inside=chosen.inside)
    runs.tandem("train", RECIPE, "--run.name=local", *LONG)
    ends(runs, "two")
    assert difference(PodRun(tmp_path / "runs", name="two"), PodRun(tmp_path / "runs", name="local")) == []


def test_a_node_whose_disk_is_full_takes_no_bit_with_it(machines: tuple[Network, RayCluster, LaunchedRuns], tmp_path: Path) -> None:
    network, cluster, runs = machines
    wait_for_room(runs, cluster.address, 2)
    runs.tandem("train", RECIPE, "--on", "ray", f"--ray.address={cluster.address}", "--run.name=two", "--ray.nodes=2", "--pods.min_count=2", *LONG)
    chosen = network.hosts[host_of(network, runs, "two", "ray-1")]
    runs.wait_for_step("two", 12)
    node = next(process for name, process in cluster.processes.items() if name == chosen.name)
    # The folder for temporary files of that machine, which is a file system of its own.
    disk = Path(f"/proc/{node.pid}/root{chosen.hidden}")
    subprocess.run(["nsenter", f"--target={node.pid}", "--mount", "mount", "-o", "remount,size=16m", chosen.hidden], check=True)
    filled = subprocess.run(["dd", "if=/dev/zero", f"of={disk}/fill", "bs=1M"], capture_output=True, text=True)
    assert "No space left" in filled.stderr and os.statvfs(disk).f_bavail == 0
    runs.tandem("train", RECIPE, "--run.name=local", *LONG)
    ends(runs, "two")
    assert difference(PodRun(tmp_path / "runs", name="two"), PodRun(tmp_path / "runs", name="local")) == []


def test_a_run_on_data_and_a_name_that_is_taken_on_the_cluster(machines: tuple[Network, RayCluster, LaunchedRuns], tmp_path: Path) -> None:
    _, cluster, runs = machines
    wait_for_room(runs, cluster.address, 2)
    long = ("--run.max_steps=1000000", "--checkpoint.every_steps=100000")
    on = ("--on", "ray", f"--ray.address={cluster.address}", "--run.name=job")
    runs.tandem("train", TINY, *on, *long)
    runs.wait_for_step("job", 2)
    runs.directory("job").rename(tmp_path / "moved")
    assert re.match(r"job 'job-[0-9a-f]{8}-1' is on this Ray cluster already; end it first", runs.refusal("train", TINY, *on))
    (tmp_path / "moved").rename(runs.directory("job"))
    assert runs.tandem("cancel", "runs/job", "--now").startswith("cancelled job job-")
    assert runs.status("job")["state"] == "stopped"
