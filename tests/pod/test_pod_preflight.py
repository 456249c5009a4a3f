"""The preflight of pods that join one by one: each measures its machine before it joins, and the run cordons those that are not fit."""

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from etcd_server import EtcdServer
from joined_machines import Machines, needs_etcd
from network import why_not
from pod_runs import PodRun, finish
from wall_clock import WallClock

from tandem.config.cluster import ClusterConfig
from tandem.pod.nodes import Nodes
from tandem.runtime.coordination.cordons import cordons
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.health.node_report import REPORTS, NodeReport, own_versions

FREE = {"disk": 2**34, "shm": 2**33}
GOOD = NodeReport("n", own_versions(), (), {"matrix products": 1e11, "memory": 1e10, "disk": 1e9}, FREE)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedStore]:
    made = EmbeddedStore(tmp_path / "run.sqlite")
    yield made
    made.close()


def report(store: EmbeddedStore, node: str, **changed: object) -> None:
    store.put(REPORTS + node, replace(GOOD, node=node, **changed).to_json().encode())  # type: ignore[arg-type]


def test_a_node_that_is_not_fit_is_cordoned_in_one_line_and_the_others_are_not(store: EmbeddedStore) -> None:
    nodes = Nodes("r", preflight=ClusterConfig())
    report(store, "n1")
    report(store, "n2", free_bytes={"disk": 2**34, "shm": 2**20})
    report(store, "n3", versions={**own_versions(), "torch": "1.0"})
    report(store, "n4", failed={"disk": "Read-only file system"})
    nodes.look(store)
    found = {node: each.reason for node, each in cordons(store).items()}
    assert set(found) == {"n2", "n3", "n4"} and all("\n" not in reason for reason in found.values())
    assert found["n2"].startswith("node n2 has 0.000977 GiB free in /dev/shm, less than cluster.min_shm_gib (0.0625)")
    assert found["n3"].startswith("node n3 has torch 1.0 and the controller has ") and found["n4"] == "node n4: disk: Read-only file system"
    assert nodes.why_few().count("; node ") == 3


def test_speeds_are_compared_from_three_nodes_on_and_a_node_in_use_is_not_judged_by_later_ones(store: EmbeddedStore) -> None:
    nodes = Nodes("r", preflight=ClusterConfig())
    slow = {**GOOD.speeds, "matrix products": 4e10}
    report(store, "n1", speeds=slow)
    report(store, "n2")
    nodes.look(store)
    nodes.states["n1"] = "in use"
    report(store, "n3", speeds=slow)
    report(store, "n4")
    report(store, "n5")
    nodes.look(store)
    assert set(cordons(store)) == {"n3"} and "node n3 is slow: matrix products 40 GFLOP/s, 40% of the median of 5 nodes" in cordons(store)["n3"].reason


def test_without_the_preflight_nobody_is_judged(store: EmbeddedStore) -> None:
    report(store, "n2", failed={"disk": "gone"})
    Nodes("r").look(store)
    assert cordons(store) == {}


@needs_etcd
@pytest.mark.full
def test_a_pod_whose_clock_is_apart_is_told_of_and_takes_part_once_its_time_service_has_set_it(tmp_path: Path, etcd_server: EtcdServer) -> None:
    machines = Machines(tmp_path, etcd_server, ("--pods.min_count=2", "--cluster.preflight=true", "--cluster.min_speed=0"))
    clock = WallClock(tmp_path / "clock", 60.0)
    machines.pods["n2"] = PodRun(tmp_path / "n2", environment=clock.environment)
    try:
        pod = machines.pod("n2")
        machines.wait_for("n2", "joined run", pod)
        train = machines.train()
        ends, log = time.monotonic() + 240, machines.run.directory / "logs" / "controller.log"
        while not log.exists() or "(n2) could not be prepared" not in log.read_text():
            assert time.monotonic() < ends and train.poll() is None, finish(train)
            time.sleep(0.1)
        line = r"the clock of node n2 \(.*\) is (59|60)\.\d s ahead of that of the controller, more than cluster\.max_clock_offset_s \(1\); start its time"
        assert re.search(line, log.read_text())
        clock.set(0.0)
        done = finish(train)
        assert done.returncode == 0 and re.search(line, done.stdout + done.stderr), done.stdout + done.stderr
        assert machines.members()[0] == ("refused", "n2") and ("joined", "n2") in machines.members()
        pod.terminate()
        pod.wait(60)
    finally:
        machines.close()


@needs_etcd
@pytest.mark.full
def test_a_pod_on_a_machine_with_too_little_shared_memory_is_told_of_and_not_used(tmp_path: Path, etcd_server: EtcdServer) -> None:
    if why := why_not() or ("" if shutil.which("unshare") else "unshare is not installed"):
        pytest.skip(why)
    machines = Machines(tmp_path, etcd_server, ("--pods.max_count=3", "--pods.min_count=2", "--cluster.preflight=true", "--cluster.min_speed=0"))
    small = 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"'
    machines.pods["n2"] = PodRun(tmp_path / "n2", inside=lambda *command: ["unshare", "--mount", "--propagation", "private", "sh", "-c", small, "sh", *command])
    try:
        pods = {name: machines.pod(name) for name in ("n2", "n3")}
        for name, pod in pods.items():
            machines.wait_for(name, "joined run", pod)
        done = finish(machines.train())
        assert done.returncode == 0, done.stdout + done.stderr
        [cordoned] = machines.run.events("cordon")
        assert cordoned.detail["node"] == "n2" and "free in /dev/shm, less than cluster.min_shm_gib (0.0625)" in cordoned.detail["reason"]
        assert "node n2 is cordoned: node n2 has " in done.stdout + done.stderr
        assert {name for what, name in machines.members() if what == "joined"} == {"n3"}
        for pod in pods.values():
            pod.terminate()
            pod.wait(60)
    finally:
        machines.close()
