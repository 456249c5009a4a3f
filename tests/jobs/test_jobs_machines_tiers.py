"""Checkpoints of a run on data over several machines in their memory and on their disks: what is left has the state, and no bit is another."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from data_runs import command, rows
from etcd_server import WHY_SKIPPED, EtcdServer, program
from machines_of_data import DataMachines
from package_data import make_datasets
from pretrain_recipe import write_recipe

from tandem.runtime.records.checkpoint_tiers import tiers_of

pytestmark = [pytest.mark.full, pytest.mark.skipif(program() is None, reason=WHY_SKIPPED)]
STEPS, RARE = 150, "--checkpoint.every_steps=1000"
"""Of the run's folder: no checkpoint before the end."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_datasets(tmp_path_factory.mktemp("data"), "json")


def write(folder: Path, data: Path) -> None:
    write_recipe(
        folder, data, data={"train": [{"path": str(data / "json")}], "global_batch_size": 6}, trainer={"micro_batch_tokens": 100},
        run={"max_steps": STEPS}, parallel={"heartbeat_timeout_s": 4.0},
    )  # fmt: skip


@pytest.fixture(scope="module")
def one(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    write(folder, data)
    command("train", "recipe.yaml", "--parallel.data=2", RARE, folder=folder)
    return folder / "run"


@pytest.fixture
def machines(data: Path, tmp_path: Path) -> Iterator[DataMachines]:
    write(tmp_path, data)
    etcd = EtcdServer(tmp_path / "etcd", options=("--unsafe-no-fsync",)).start()
    made = DataMachines(tmp_path, etcd)
    yield made
    made.close()
    etcd.kill()


def begin(machines: DataMachines, tier: str, *settings: str) -> None:
    """Starts the run and a pod of another address, which so is on another node, and waits for a checkpoint
    of the ``tier``: one is left out while another is written."""
    machines.settings = (RARE, *settings)
    machines.pod("b", "--pods.host=127.0.0.2")
    train = machines.train()
    machines.wait_for_step(1)
    ends = time.monotonic() + 120
    while not [each for each in tiers_of(machines.directory) if each.tier == tier and each.step >= 4]:
        assert time.monotonic() < ends and train.poll() is None, machines.said("train")
        time.sleep(0.02)


def loaded(machines: DataMachines) -> dict[str, Any]:
    """Returns what the ranks that started last have loaded."""
    return machines.events("checkpoint_loaded")[-1].detail


def assert_same(machines: DataMachines, one: Path) -> None:
    model = "model/model.safetensors"
    assert rows(machines.directory) == rows(one) and (machines.directory / model).read_bytes() == (one / model).read_bytes()


@pytest.mark.parametrize("what", ["rank", "machine"])
def test_a_rank_that_dies_or_its_whole_machine_costs_no_checkpoint_of_the_folder(what: str, machines: DataMachines, one: Path) -> None:
    begin(machines, "memory", "--checkpoint.memory_every_steps=1")
    of_b = machines.processes("b")
    for pid in [pid for pid, line in of_b.items() if "data_rank" in line] if what == "rank" else of_b:
        os.kill(pid, signal.SIGKILL)
    if what == "machine":
        machines.commands.pop("b").wait()
        machines.pod("c", "--pods.host=127.0.0.3")
    machines.ended("train")
    found = loaded(machines)
    assert (found["tier"], found["step"] >= 4, found["read_bytes"].get("folder", 0)) == ("memory", True, 0)
    assert_same(machines, one)
    assert machines.ended("b" if what == "rank" else "c") and machines.left_behind() == []


def test_the_loss_of_the_controllers_machine_is_resumed_from_the_memory_of_a_pod(machines: DataMachines, one: Path) -> None:
    begin(machines, "memory", "--checkpoint.memory_every_steps=1")
    for pid in machines.processes("train"):
        os.kill(pid, signal.SIGKILL)
    machines.commands.pop("train").wait()
    machines.resume()
    machines.ended("resume")
    found = loaded(machines)
    assert (found["tier"], set(found["where"].values()), found["step"] >= 4) == ("memory", {"b"}, True)
    assert_same(machines, one)
    assert machines.ended("b") and machines.left_behind() == []


def test_each_rank_has_its_state_from_the_disk_of_its_own_machine_and_nothing_stays_there(machines: DataMachines, one: Path) -> None:
    disk = machines.folder / "disk"
    begin(machines, "local", f"--checkpoint.local_directory={disk}", "--checkpoint.local_every_steps=2")
    [kept] = disk.iterdir()
    assert sorted(path.name for path in kept.iterdir()) == ["node-127.0.0.1", "node-127.0.0.2"]
    for pid in [pid for pid, line in machines.processes("b").items() if "data_rank" in line]:
        os.kill(pid, signal.SIGKILL)
    machines.ended("train")
    assert (loaded(machines)["tier"], loaded(machines)["step"] >= 4) == ("local", True)
    assert_same(machines, one)
    assert machines.ended("b") and machines.left_behind() == [] and list(disk.iterdir()) == []


def test_files_in_the_memory_of_the_nodes_outlive_all_processes_and_not_the_run(machines: DataMachines, one: Path) -> None:
    memory = machines.folder / "memory"
    begin(machines, "memory", "--checkpoint.memory_every_steps=1", f"--checkpoint.memory_directory={memory}")
    for pid in machines.processes():
        os.kill(pid, signal.SIGKILL)
    for name in ("train", "b"):
        machines.commands.pop(name).wait()
    machines.pod("b", "--pods.host=127.0.0.2")
    machines.resume()
    machines.ended("resume")
    found = loaded(machines)
    assert (found["tier"], found["step"] >= 4, found["read_bytes"].get("folder", 0)) == ("memory", True, 0)
    assert_same(machines, one)
    assert machines.ended("b") and machines.left_behind() == []
    assert [path for path in memory.rglob("*") if path.is_file()] == []
