"""What is wrong on the nodes of a Ray cluster that exists is one line before a run is placed, and nothing is left."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from launched_runs import TINY, LaunchedRuns
from network import Host, Network
from pod_runs import RECIPE
from ray_cluster import RayCluster
from ray_machines import machines, marks, wait_for_room
from wall_clock import WallClock

pytestmark = marks
__all__ = ["machines"]
_TAKES = "import socket, sys; taken = socket.create_server((sys.argv[1], int(sys.argv[2]))); print(flush=True); sys.stdin.read()"


@contextlib.contextmanager
def port_taken(host: Host, address: str, port: int) -> Iterator[None]:
    """Inside, a process on the machine listens on the port."""
    command = host.inside(sys.executable, "-c", _TAKES, address, str(port))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield
        process.stdin.close()


def test_a_port_that_is_taken_on_a_node_and_a_clock_apart_are_refused(machines: tuple[Network, RayCluster, LaunchedRuns], tmp_path: Path) -> None:
    network, cluster, runs = machines
    on = ("--on", "ray", f"--ray.address={cluster.address}", "--run.name=refused")
    wait_for_room(runs, cluster.address, 2)
    first, second = network.hosts.values()
    may, taken = "of the Ray cluster, on which the run may be placed", "cannot be taken (Address already in use); choose a free port, or 0 for any free one"
    with port_taken(second, "127.0.0.1", 47123):
        for dry in ((), ("--dry-run",)):
            said = runs.refusal("train", TINY, *on, *dry, "--metrics.port=47123")
            assert said == f"node {second.name} {may}: port 47123 on 127.0.0.1 {taken}"
        with port_taken(first, "127.0.0.1", 47123):
            said = runs.refusal("train", TINY, *on, "--metrics.port=47123")
            assert said == f"nodes {first.name}, {second.name} {may}: port 47123 on 127.0.0.1 {taken}"
        assert "has room for 2 " in runs.tandem("train", TINY, *on, "--dry-run", "--metrics.port=47124")
    # Each pod takes it at the address of its node.
    with port_taken(second, second.address, 47125):
        said = runs.refusal("train", RECIPE, *on, "--ray.nodes=2", "--pods.port=47125")
        assert said == f"node {second.name} {may}: port 47125 on {second.address} {taken}"
    cluster.add("ahead", environment=WallClock(tmp_path / "clock", 60.0).environment)
    cluster.wait_for("ahead")
    wait_for_room(runs, cluster.address, 3)
    said = runs.refusal("train", RECIPE, *on, "--ray.nodes=2")
    assert said.startswith("the clock of node ahead is ") and any(f" s ahead of that of {host.name}, more than" in said for host in (first, second)), said
    assert 59 < float(said.partition(" is ")[2].partition(" ")[0]) < 61 and said.endswith("; start its time service (chronyd or ntpd)"), said
    # A limit above it is one that it keeps.
    assert "has room for 3 " in runs.tandem("train", RECIPE, *on, "--ray.nodes=2", "--dry-run", "--cluster.max_clock_offset_s=90")
    assert not (tmp_path / "runs").exists()


def test_a_node_that_joins_later_with_its_clock_apart_is_named_and_taken_once_its_clock_is_set(
    machines: tuple[Network, RayCluster, LaunchedRuns], tmp_path: Path
) -> None:
    _, cluster, runs = machines
    on = ("--on", "ray", f"--ray.address={cluster.address}", "--run.name=later", "--ray.nodes=2", "--ray.max_nodes=3", "--cluster.min_speed=0")
    wait_for_room(runs, cluster.address, 2)
    runs.tandem("train", RECIPE, *on, "--run.max_steps=100000", "--evaluation.every_steps=100000", "--checkpoint.every_steps=100000")
    runs.wait_for_step("later", 3)
    clock = WallClock(tmp_path / "clock", 60.0)
    cluster.add("ahead", environment=clock.environment)
    cluster.wait_for("ahead")
    runs.tandem("scale", "runs/later", "3")
    line = r"pod 2 \(ray-2\) could not join the run: the clock of node ray-2 \(.*\) is (59|60)\.\d s ahead of that of the controller, more than"
    runs.wait_for_output("later", line)
    clock.set(0.0)
    runs.wait_for_output("later", r"pod 2 \(ray-2\) joined the run")
    runs.tandem("cancel", "runs/later")
    assert runs.wait_for_state("later", "finished", "failed", "stopped")["state"] == "stopped", runs.output("later")
