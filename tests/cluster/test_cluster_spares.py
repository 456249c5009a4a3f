"""Spares and the preflight in jobs of a real Slurm of four nodes."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import WHY_SKIPPED as WHY_NO_ETCD
from etcd_server import program
from launched_runs import LaunchedRuns
from pod_runs import RECIPE, PodRun, difference
from slurm_cluster import WHY_SKIPPED, SlurmCluster, is_installed

pytestmark = pytest.mark.full
LONG = ("--run.max_steps=40", "--evaluation.every_steps=40", "--checkpoint.every_steps=5", "--cluster.min_speed=0")
SPARE = ("--slurm.nodes=3", "--cluster.spares=1", "--coordination.lease_s=5")


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[LaunchedRuns]:
    if why := (WHY_SKIPPED if not is_installed() else WHY_NO_ETCD if program() is None else ""):
        pytest.skip(why)
    cluster = SlurmCluster(tmp_path / "slurm", nodes=4)
    try:
        cluster.start()
        yield LaunchedRuns(tmp_path, cluster.environment)
    finally:
        cluster.clear()
        cluster.stop()


def processes_of(slurm: LaunchedRuns, node: str) -> list[int]:
    """Returns the processes of the pod on ``node``, its agent included."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes().split(b"\0")
        except OSError:
            continue
        of_test = any(each.startswith(b"SLURM_CONF=" + str(slurm.folder).encode()) for each in environment)
        if of_test and f"SLURMD_NODENAME={node}".encode() in environment and b"SLURM_STEP_ID=" in b" ".join(environment):
            found.append(int(path.parent.name))
    return found


def node_states(run: PodRun) -> dict[str, str]:
    return {event.detail["node"]: event.detail["state"] for event in sorted([*run.events("node"), *run.events("cordon")], key=lambda event: event.id)}


def wait_for_states(slurm: LaunchedRuns, name: str, *states: str) -> dict[str, str]:
    ends = time.monotonic() + 240
    while True:
        found = node_states(PodRun(slurm.folder / "runs", name=name)) if (slurm.directory(name) / "journal.sqlite").exists() else {}
        if sorted(found.values()) == sorted(states):
            return found
        assert time.monotonic() < ends, (found, slurm.output(name))
        time.sleep(0.2)


@pytest.mark.parametrize("trains", [False, True], ids=["rollout", "trainer"])
def test_a_node_that_is_killed_is_cordoned_and_its_spare_ends_the_run_with_the_same_weights(trains: bool, slurm: LaunchedRuns) -> None:
    mesh = ("--parallel.data=2",) if trains else ()
    more = ("--trainer-pods", "2") if trains else ("--pods.min_count=2",)
    slurm.tandem("train", RECIPE, "--on", "slurm", "--run.name=spared", *SPARE, *LONG, *mesh, *more)
    states = wait_for_states(slurm, "spared", "in use", "spare")
    slurm.wait_for_step("spared", 6)
    failed, spare = sorted(states, key=states.__getitem__)
    for pid in processes_of(slurm, failed):
        os.kill(pid, signal.SIGKILL)
    assert slurm.wait_for_state("spared", "finished", "failed", "stopped")["state"] == "finished", slurm.output("spared")
    run = PodRun(slurm.folder / "runs", name="spared")
    assert node_states(run) == {failed: "cordoned", spare: "in use"}
    shown = {each["node"]: each for each in slurm.status("spared")["nodes"]}
    assert shown[failed]["state"] == "cordoned" and shown[failed]["reason"].startswith("its pod was lost"), shown
    slurm.tandem("train", RECIPE, "--run.name=one", *LONG, *mesh)
    assert difference(run, PodRun(slurm.folder / "runs", name="one")) == []


def test_a_run_whose_nodes_are_not_fit_fails_in_one_line_before_it_begins(slurm: LaunchedRuns) -> None:
    slurm.tandem("train", RECIPE, "--on", "slurm", "--run.name=small", "--slurm.nodes=2", "--cluster.min_shm_gib=100000")
    status = slurm.wait_for_state("small", "finished", "failed", "stopped")
    assert status["state"] == "failed", slurm.output("small")
    for node in ("n1", "n2"):
        assert f"node {node} has " in status["reason"] and "free in /dev/shm, less than cluster.min_shm_gib (100000)" in status["reason"]
    assert "0 of 2 nodes are fit and the run needs 2 (cluster.spares is 0)" in status["reason"]
    assert not (slurm.directory("small") / "journal.sqlite").exists()
    measured = json.loads((slurm.directory("small") / "launch" / "preflight.json").read_text())
    assert [report["node"] for report in measured["reports"]] == ["n1", "n2"] and all(report["links"] for report in measured["reports"])
