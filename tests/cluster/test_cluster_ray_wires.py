"""A run over a Ray cluster whose nodes are machines of their own loses no bit when the wire of one is pulled."""

import time
from pathlib import Path

import pytest
from launched_runs import LaunchedRuns
from network import Network
from pod_runs import RECIPE, PodRun, difference
from ray_cluster import RayCluster
from ray_machines import LONG, SHORT, ends, host_of, machines, marks, wait_for_room

pytestmark = marks
__all__ = ["machines"]


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
