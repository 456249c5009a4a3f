"""Nodes of a Ray that vanish for good, as spot instances do: the run goes on with those that are left, takes a new node when one comes, and ends with the bits
of the local run."""

import importlib.util
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import WHY_SKIPPED, program
from launched_runs import LaunchedRuns, left_behind
from pod_runs import RECIPE, PodRun
from ray_cluster import RayCluster, descendants

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed, so runs on Ray are NOT tested"),
    pytest.mark.skipif(program() is None, reason=WHY_SKIPPED),
]
LONG = ("--evaluation.target_accuracy=1.0", "--evaluation.every_steps=100000", "--checkpoint.every_steps=10")


@pytest.fixture
def spot(tmp_path: Path) -> Iterator[tuple[RayCluster, LaunchedRuns]]:
    """A Ray of two nodes of one core each, and the command with its token."""
    cluster = RayCluster("127.0.0.1").start()
    try:
        for name in ("first", "second"):
            cluster.add(name)
        for name in ("first", "second"):
            cluster.wait_for(name)
        yield cluster, LaunchedRuns(tmp_path, cluster.environment)
    finally:
        cluster.stop()
    assert left_behind(tmp_path) == []


def nodes(runs: LaunchedRuns) -> dict[str, str]:
    return dict(re.findall(r"(controller|ray-\d) on (\w+)", runs.status("spot")["where"]))


def wait_for(runs: LaunchedRuns, roles: int) -> dict[str, str]:
    """Waits until so many roles of the run have a node."""
    until = time.monotonic() + 120
    while len(found := nodes(runs)) < roles:
        assert time.monotonic() < until, runs.status("spot")
    return found


@pytest.mark.parametrize("role", ["ray-1", "controller"])
def test_a_node_that_vanishes_for_good_is_missed_and_a_new_one_is_taken(spot: tuple[RayCluster, LaunchedRuns], role: str, tmp_path: Path) -> None:
    cluster, runs = spot
    on = ("--on", "ray", f"--ray.address={cluster.address}", "--run.name=spot", "--ray.nodes=2")
    runs.tandem("train", RECIPE, *on, "--pods.heartbeat_timeout_s=5", "--run.max_steps=100000", *LONG)
    lost = wait_for(runs, 2)[role]
    until = time.monotonic() + 240
    while "(ray-1) joined the run" not in runs.output("spot"):
        assert time.monotonic() < until, runs.output("spot")
        time.sleep(0.1)
    before = len(runs.rows("spot"))
    vanished = cluster.processes.pop(lost)
    for process in descendants(vanished.pid)[:2]:
        os.kill(process, signal.SIGKILL)
    vanished.wait()
    # With fewer, and on the node that is left. What ran on the other one takes a moment to end, and may take steps meanwhile.
    until = time.monotonic() + 120
    while nodes(runs) != {"controller": ({"first", "second"} - {lost}).pop()}:
        assert time.monotonic() < until, runs.status("spot")
    runs.wait_for_step("spot", max(before, len(runs.rows("spot"))) + 15)
    status = runs.status("spot")
    assert status["state"] == "running", status
    assert "ray-1 waiting for room on the cluster" in status["reason"]
    cluster.add("third")
    cluster.wait_for("third")
    assert wait_for(runs, 2)["ray-1"] == "third"
    until = time.monotonic() + 240
    while runs.output("spot").count("(ray-1) joined the run") < 2:
        assert time.monotonic() < until, runs.output("spot")
        time.sleep(0.1)
    runs.tandem("cancel", "runs/spot")
    saved = runs.wait_for_state("spot", "stopped", "failed", "finished")
    assert saved["state"] == "stopped" and saved["checkpoint"] == saved["steps"], (saved, runs.output("spot"))
    steps = f"--run.max_steps={saved['steps'] + 2}"
    runs.tandem("resume", "runs/spot", "--on", "local", "--coordination={store: embedded}", "--pods={}", steps)
    runs.tandem("train", RECIPE, "--run.name=local", *LONG, steps)
    assert runs.model("spot") == runs.model("local")
    joined = [event.detail for event in PodRun(tmp_path / "runs", name="spot").events("membership") if "joined" in event.detail]
    assert [each["name"] for each in joined].count("ray-1") >= 2
