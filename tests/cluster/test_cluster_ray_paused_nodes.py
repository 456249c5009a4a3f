"""Runs on a real Ray of which a node stands still until Ray takes it for dead have the bits of the local run, and nothing is left of them."""

import pytest
from launched_runs import LaunchedRuns, left_behind
from pod_runs import RECIPE, difference
from ray_cluster import pause
from ray_runs import LONG, ended, marks, placed, ran, runs

from tandem.cluster.launch.ray.own_cluster import node_processes

pytestmark = marks
__all__ = ["runs"]


@pytest.mark.parametrize("role", ["controller", "ray-1"])
def test_a_node_that_stands_still_takes_no_bit_with_it(runs: LaunchedRuns, role: str) -> None:
    runs.tandem("train", RECIPE, "--on", "ray", "--run.name=three", "--ray.nodes=3", "--pods.min_count=2", "--pods.heartbeat_timeout_s=5", *LONG)
    roles = placed(runs, "three")
    runs.wait_for_step("three", 12)
    # So long that Ray takes it for dead and goes on elsewhere.
    pause(node_processes(runs.directory("three"))[roles[role]], 20)
    runs.tandem("train", RECIPE, "--run.name=local", *LONG)
    ended(runs, "three")
    assert difference(ran(runs, "three"), ran(runs, "local")) == [] and left_behind(runs.folder) == []
