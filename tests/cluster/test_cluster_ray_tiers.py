"""A Ray whose nodes are machines of their own loses one of a run, also the first, with its keeper, its etcd and all processes: the trainer has its state back
from the memory of a peer, none of it from the run's folder, and the run ends with the bits of a local one."""

import os
import signal
import time
from pathlib import Path

import pytest
from kept_checkpoints import wait_until_kept
from launched_runs import LaunchedRuns, left_behind
from network import Network
from pod_runs import RECIPE, PodRun, difference
from ray_cluster import RayCluster, descendants
from ray_machines import ends, host_of, machines, marks, wait_for_room

from tandem.trainer.checkpoint.memory.launched_keepers import FOLDER as KEEPERS

pytestmark = marks
__all__ = ["machines"]
KEEPER = "memory.keeper"
STEPS = ("--run.max_steps=60", "--evaluation.target_accuracy=1.0", "--evaluation.every_steps=60", "--checkpoint.every_steps=1000")
MEMORY = ("--checkpoint.memory_every_steps=1", "--pods.heartbeat_timeout_s=5")


@pytest.mark.parametrize(
    ("role", "ranks", "comes_back"), [("controller", 1, False), ("controller", 2, True), ("ray-1", 2, True)], ids=["for-good", "controller", "pod"]
)  # fmt: skip
def test_a_lost_node_never_needs_the_folder(
    machines: tuple[Network, RayCluster, LaunchedRuns], role: str, ranks: int, comes_back: bool, tmp_path: Path
) -> None:
    """Where the controller's node does not come back, the controller takes the place of the pod, whose keeper is there all the same."""
    network, cluster, runs = machines
    wait_for_room(runs, cluster.address, 2)
    trains = (f"--parallel.data={ranks}",)
    runs.tandem(
        "train", RECIPE, "--on", "ray", f"--ray.address={cluster.address}", "--run.name=two", "--ray.nodes=2", f"--pods.min_count={1 + comes_back}",
        f"--pods.trainer_count={ranks}", *MEMORY, *trains, *STEPS,
    )  # fmt: skip
    chosen = network.hosts[host_of(network, runs, "two", role)]
    wait_until_kept(runs.directory("two"), 8)
    # The raylet and all that it has started: the machine has lost its power.
    node = cluster.processes.pop(chosen.name)
    for process in descendants(node.pid):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    node.wait()
    if comes_back:
        cluster.add(chosen.name, host=chosen.address, inside=chosen.inside)
    runs.tandem("train", RECIPE, "--run.name=local", *trains, *STEPS)
    ends(runs, "two")
    two, local = (PodRun(tmp_path / "runs", name=name) for name in ("two", "local"))
    event = two.loaded()[0]
    assert event["tier"] == "memory" and event["step"] >= 8 and event["read_bytes"] == {"memory": event["bytes"], "folder": 0}, event
    assert difference(two, local) == []
    # The cluster goes on without them.
    assert left_behind(tmp_path, KEEPER) == [] and not (two.directory / KEEPERS).exists()


def test_a_keeper_ends_with_the_pod_that_leaves_its_node_and_with_a_job_that_is_cancelled_at_once(
    machines: tuple[Network, RayCluster, LaunchedRuns], tmp_path: Path
) -> None:
    _, cluster, runs = machines
    wait_for_room(runs, cluster.address, 2)
    runs.tandem(
        "train", RECIPE, "--on", "ray", f"--ray.address={cluster.address}", "--run.name=two", "--ray.nodes=2", "--pods.min_count=1", *MEMORY,
        "--run.max_steps=100000", *STEPS[1:],
    )  # fmt: skip
    wait_until_kept(runs.directory("two"), 2)
    runs.tandem("scale", "runs/two", "1")
    until = time.monotonic() + 120
    while (runs.directory("two") / KEEPERS).exists():
        assert time.monotonic() < until, runs.output("two")
        time.sleep(0.1)
    before = len(runs.rows("two"))
    runs.wait_for_step("two", before + 2)
    runs.tandem("scale", "runs/two", "2")
    while not (runs.directory("two") / KEEPERS).exists():
        assert time.monotonic() < until, runs.output("two")
        time.sleep(0.1)
    assert [path.suffix for path in (runs.directory("two") / KEEPERS).iterdir()] == [".json"]
    runs.tandem("cancel", "runs/two", "--now")
    assert left_behind(tmp_path, KEEPER) == [] and not (runs.directory("two") / KEEPERS).exists()
