"""What is watched of the machines of a run on data while their ranks train, and what a cordon does, through a real etcd and real processes."""

import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from data_runs import command, rows
from etcd_server import WHY_SKIPPED, EtcdServer, program
from machines_of_data import DataMachines
from package_data import make_datasets
from pretrain_recipe import write_recipe

sys.path.append(str(Path(__file__).parents[1] / "health"))
from nvidia_programs import NvidiaPrograms
from prometheus_client.parser import text_string_to_metric_families
from watched_run import throttled

from tandem.cluster.nodes import read_nodes
from tandem.dashboard.hardware import hardware
from tandem.dashboard.nodes import nodes
from tandem.dashboard.open_run import OpenRun
from tandem.metrics_database.answers import Answers
from tandem.metrics_database.store import FILE, MetricsReader
from tandem.observability.alerts import ALERTS
from tandem.runtime.health.gpu_faults import boot_s

pytestmark = [pytest.mark.full, pytest.mark.skipif(program() is None, reason=WHY_SKIPPED)]
STEPS = 500
_LIMIT_S = 240.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_datasets(tmp_path_factory.mktemp("data"), "json")


def write(folder: Path, data: Path, steps: int, **create: int) -> None:
    write_recipe(
        folder, data, create=create, data={"train": [{"path": str(data / "json")}], "global_batch_size": 6}, trainer={"micro_batch_tokens": 100},
        run={"max_steps": steps}, checkpoint={"every_steps": 1000}, parallel={"heartbeat_timeout_s": 10.0}, health={"every_s": 0.5, "straggler_steps": 8},
        metrics={"port": 0, "interval_s": 1},
    )  # fmt: skip


@pytest.fixture(scope="module")
def one(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    write(folder, data, STEPS)
    command("train", "recipe.yaml", "--parallel.data=2", folder=folder)
    return folder / "run"


@pytest.fixture
def machines(data: Path, tmp_path: Path) -> Iterator[DataMachines]:
    write(tmp_path, data, STEPS)
    etcd = EtcdServer(tmp_path / "etcd", options=("--unsafe-no-fsync",)).start()
    made = DataMachines(tmp_path, etcd)
    yield made
    made.close()
    etcd.kill()


def wait_for(machines: DataMachines, what: Callable[[], Any]) -> Any:
    ends = time.monotonic() + _LIMIT_S
    while not (value := what()):
        assert time.monotonic() < ends and machines.commands["train"].poll() is None, machines.said("train")
        time.sleep(0.1)
    return value


def series(machines: DataMachines, name: str) -> dict[frozenset[tuple[str, str]], float]:
    """Returns the values of ``name`` that ``/metrics`` of the run has now, by their labels."""
    said = machines.said("train")
    address = said[said.index("metrics at ") :].split()[2]
    with urllib.request.urlopen(address, timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {frozenset(sample.labels.items()): sample.value for family in families for sample in family.samples if sample.name == name}


def of_node(machines: DataMachines, name: str, node: str) -> dict[frozenset[tuple[str, str]], float]:
    return {labels: value for labels, value in series(machines, name).items() if ("node", node) in labels}


def rank_of(machines: DataMachines, name: str) -> int:
    [pid] = [pid for pid, line in machines.processes(name).items() if "data_rank" in line]
    return pid


def assert_same(machines: DataMachines, one: Path) -> None:
    model = "model/model.safetensors"
    assert rows(machines.directory) == rows(one) and (machines.directory / model).read_bytes() == (one / model).read_bytes()


def test_a_rank_on_another_machine_that_is_slow_is_named_with_its_node_and_phase_in_all_places(data: Path, machines: DataMachines) -> None:
    write(machines.folder, data, 100_000, hidden_size=64, num_hidden_layers=4, intermediate_size=256)
    machines.pod("b")
    train = machines.train()
    machines.wait_for_step(20)
    # Of the other machine as of this one: what its ranks do, its heartbeat, and the memory of each of its processes.
    wait_for(machines, lambda: of_node(machines, "tandem_rank_own_seconds_total", "b"))
    wait_for(machines, lambda: of_node(machines, "tandem_node_last_look_timestamp_seconds", "b"))
    assert {dict(labels)["rank"] for labels in series(machines, "tandem_rank_own_seconds_total")} == {"0", "1"}
    wait_for(machines, lambda: any(("rank", "1") in labels for labels in of_node(machines, "tandem_process_resident_memory_bytes", "b")))
    assert machines.events("straggler") == [], "a healthy run gives no false alarm"
    with throttled(rank_of(machines, "b")):
        [event, *_] = wait_for(machines, lambda: machines.events("straggler"))
        assert (event.detail["rank"], event.detail["node"]) == (1, "b")
        assert event.detail["phase"] in ("forward", "backward", "optimizer", "train", "data", "reduce")
        assert [value for labels, value in of_node(machines, "tandem_rank_straggler", "b").items() if ("rank", "1") in labels] == [1.0]
        machines.wait_until_said("train", "rank 1 on b is a straggler")
        [rule], answers = [each for each in ALERTS if each.name == "TandemStraggler"], Answers(MetricsReader(machines.directory / FILE).read)
        [(labels, _)] = wait_for(machines, lambda: answers.instant(rule.expr, round(1000 * time.time())))
        assert ("node", "b") in labels and ("rank", "1") in labels
    wait_for(machines, lambda: machines.events("straggler_over"))
    shown = {each["node"]: each for each in nodes(OpenRun("run", machines.directory))["nodes"]}
    assert shown["b"]["state"] == "in use" and shown["b"]["seen_s"] > time.time() - 60 and shown[socket.gethostname()]["state"] == "controller"
    [memory] = [chart for chart in hardware(OpenRun("run", machines.directory))["charts"] if chart["title"] == "Memory by process"]
    assert any(str(line["name"]).endswith(" b") for line in memory["series"]), memory
    train.send_signal(signal.SIGTERM)
    machines.ended("train", status=130)
    machines.ended("b")
    assert machines.left_behind() == []


def test_a_fatal_error_of_a_gpu_elsewhere_cordons_the_node_and_a_spare_has_its_ranks(machines: DataMachines, one: Path) -> None:
    nvidia = NvidiaPrograms(machines.folder / "bin")
    for name in ("b", "c"):
        machines.inside[name] = ("env", f"PATH={nvidia.path}" if name == "b" else f"PATH={os.environ['PATH']}")
    machines.settings = ("--cluster.spares=1", "--machine.device=cpu")
    machines.pod("b")
    machines.wait_until_said("b", "joined run")
    machines.train()
    machines.wait_until_said("b", "trains with rank 1")
    machines.pod("c")
    machines.wait_for_step(6)
    nvidia.log(f"[{boot_s() + 1:.6f}] NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.")
    said = machines.ended("train")
    assert "node b is not fit any more: XID 79" in said and "trains with rank 1" in machines.ended("c")
    machines.ended("b")
    assert [event.detail["node"] for event in machines.events("node_unfit")] == ["b"]
    assert {each.node: each.state for each in read_nodes(machines.directory)} == {"b": "cordoned", "c": "in use"}
    assert len(machines.events("recovery")) == 1 and machines.left_behind() == []
    assert_same(machines, one)


def test_a_cordon_by_hand_moves_the_ranks_of_a_running_run_to_a_pod_that_waits_and_costs_no_step(machines: DataMachines, one: Path) -> None:
    machines.settings = ("--cluster.spares=1",)
    machines.pod("b")
    machines.train()
    machines.wait_until_said("b", "trains with rank 1")
    machines.wait_for_step(4)
    cordon = ("nodes", "cordon", "recipe.yaml", "b", "--reason", "fan 3", *machines.common)
    command(*cordon, folder=machines.folder)
    machines.wait_until_said("train", "node b is cordoned: fan 3")
    machines.wait_until_said("train", "node b keeps its ranks, though it is cordoned: no other pod waits for them")
    assert {each.node: each.state for each in read_nodes(machines.directory)} == {"b": "cordoned"}
    machines.pod("c")
    said = machines.ended("train")
    assert "the ranks on b are given to a pod that waits" in said and "trains with rank 1" in machines.ended("c")
    machines.ended("b")
    assert machines.events("recovery") == [] and [event.detail["reason"] for event in machines.events("cordon")] == ["fan 3"]
    assert {each.node: each.state for each in read_nodes(machines.directory)} == {"b": "cordoned", "c": "in use"}
    assert_same(machines, one)
    assert machines.left_behind() == []
