"""What is wrong on the nodes of a Ray cluster that exists is one line before a run is placed, and nothing is left."""

import contextlib
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from launched_runs import TINY, LaunchedRuns
from network import Host, Network
from pod_runs import RECIPE
from ray_cluster import RayCluster
from ray_machines import machines, marks, wait_for_room

pytestmark = marks
__all__ = ["machines"]
ROOT = Path(__file__).parents[2]
CLOCK = ROOT / "tests" / "pod" / "clock"
_TAKES = "import socket, sys; taken = socket.create_server(('127.0.0.1', int(sys.argv[1]))); print(flush=True); sys.stdin.read()"


@contextlib.contextmanager
def port_taken(host: Host, port: int) -> Iterator[None]:
    """Inside, a process on the machine listens on the port."""
    command = host.inside(sys.executable, "-c", _TAKES, str(port))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield
        process.stdin.close()


def test_a_port_that_is_taken_on_every_node_and_a_clock_apart_are_refused(machines: tuple[Network, RayCluster, LaunchedRuns], tmp_path: Path) -> None:
    network, cluster, runs = machines
    on = ("--on", "ray", f"--ray.address={cluster.address}", "--run.name=refused")
    wait_for_room(runs, cluster.address, 2)
    first, second = network.hosts.values()
    with port_taken(first, 47123):
        # Ray may place the controller on the other one.
        assert "has room for 2 " in runs.tandem("train", TINY, *on, "--dry-run", "--metrics.port=47123")
        with port_taken(second, 47123):
            for dry in ((), ("--dry-run",)):
                said = runs.refusal("train", TINY, *on, *dry, "--metrics.port=47123")
                assert said.startswith("port 47123 on 127.0.0.1 cannot be taken (Address already in use); choose a free port, or 0 for any free one: it is")
                assert said.endswith(f"taken on every node of the Ray cluster that fits the run ({first.name}, {second.name})"), said
    clock = tmp_path / "clock"
    clock.write_bytes(struct.pack("<d", 60.0))
    cluster.add("ahead", environment={"PYTHONPATH": f"{CLOCK}:{os.environ.get('PYTHONPATH', '')}", "TANDEM_TEST_CLOCK": str(clock)})
    cluster.wait_for("ahead")
    wait_for_room(runs, cluster.address, 3)
    said = runs.refusal("train", RECIPE, *on, "--ray.nodes=2")
    assert said.startswith("the clock of node ahead is ") and any(f" s ahead of that of {host.name}, more than" in said for host in (first, second)), said
    assert 59 < float(said.partition(" is ")[2].partition(" ")[0]) < 61 and said.endswith("; start its time service (chronyd or ntpd)"), said
    # A limit above it is one that it keeps.
    assert "has room for 3 " in runs.tandem("train", RECIPE, *on, "--ray.nodes=2", "--dry-run", "--cluster.max_clock_offset_s=90")
    assert not (tmp_path / "runs").exists()
