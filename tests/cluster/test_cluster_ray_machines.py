"""A Ray cluster that exists, whose nodes are machines of their own: what it cannot run is refused, and a run over it loses no bit when a disk is full."""

import re
import time
from pathlib import Path

from launched_runs import TINY, LaunchedRuns
from network import Network
from pod_runs import RECIPE, PodRun, difference
from ray_cluster import RayCluster
from ray_machines import LONG, ends, host_of, machines, marks, wait_for_room

pytestmark = marks
__all__ = ["machines"]


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


def test_a_node_whose_disk_is_full_takes_no_bit_with_it(machines: tuple[Network, RayCluster, LaunchedRuns], tmp_path: Path) -> None:
    network, cluster, runs = machines
    wait_for_room(runs, cluster.address, 2)
    runs.tandem("train", RECIPE, "--on", "ray", f"--ray.address={cluster.address}", "--run.name=two", "--ray.nodes=2", "--pods.min_count=2", *LONG)
    chosen = network.hosts[host_of(network, runs, "two", "ray-1")]
    runs.wait_for_step("two", 12)
    node = next(process for name, process in cluster.processes.items() if name == chosen.name)
    # The folder for temporary files of that machine, which is a file system of its own.
    chosen.fill_disk(node.pid)
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
