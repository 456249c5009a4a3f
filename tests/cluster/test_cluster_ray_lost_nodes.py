"""Runs on a real Ray of which a node is killed have the bits of the local run, and nothing is left of them."""

import os
import signal

import pytest
from launched_runs import LaunchedRuns, left_behind
from pod_runs import RECIPE, difference
from ray_cluster import descendants
from ray_runs import LONG, ended, marks, placed, ran, runs

from tandem.cluster.launch.ray.own_cluster import node_processes

pytestmark = marks
__all__ = ["runs"]


@pytest.mark.parametrize("node", ["node-1", "node-2"])
def test_a_node_that_is_killed_takes_no_bit_with_it(runs: LaunchedRuns, node: str) -> None:
    runs.tandem("train", RECIPE, "--on", "ray", "--run.name=three", "--ray.nodes=3", "--pods.min_count=3", *LONG)
    roles = placed(runs, "three")
    runs.wait_for_step("three", 12)
    # Both the controller's node and a pod's, whichever names they have.
    chosen = roles["controller"] if node == "node-1" else roles["ray-1"]
    for process in descendants(node_processes(runs.directory("three"))[chosen])[:2]:
        os.kill(process, signal.SIGKILL)
    runs.tandem("train", RECIPE, "--run.name=local", *LONG)
    ended(runs, "three")
    if node == "node-1":
        assert "from its newest checkpoint" in runs.output("three") and ran(runs, "three").events("resume")[-1].detail["step"] >= 10
    else:
        assert len([event for event in ran(runs, "three").events("membership") if "joined" in event.detail]) >= 3, runs.output("three")
    assert difference(ran(runs, "three"), ran(runs, "local")) == [] and left_behind(runs.folder) == []
