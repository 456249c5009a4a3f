"""Checkpoints in the memory of the nodes, with the real command: a node that is killed, keeper and ranks, is replaced from its peer's memory, without the
run's folder, and the run ends with the bits of an undisturbed one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from data_runs import command, forget_end, rows
from package_data import make_datasets
from pretrain_recipe import write_recipe

from tandem.runtime.records.checkpoint_tiers import tiers_of
from tandem.runtime.records.journal import Journal

pytestmark = pytest.mark.full
STEPS, NODES, EACH = 90, 2, 1


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_datasets(tmp_path_factory.mktemp("data"), "json")


def write(folder: Path, data: Path, steps: int = STEPS, **checkpoint: Any) -> None:
    write_recipe(
        folder, data,
        data={"train": [{"path": str(data / "json")}], "global_batch_size": 7}, trainer={"micro_batch_tokens": 100}, evaluation={"every_steps": 1000},
        checkpoint={"every_steps": 1000, **checkpoint}, run={"max_steps": steps}, parallel={"data": NODES * EACH, "ranks_per_node": EACH},
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    write(folder, data)
    command("train", "recipe.yaml", "--machine.threads=1", folder=folder)
    return folder


def node_of(child: int) -> int | None:
    """Returns the node of a process that is a keeper or a rank, ``None`` of another one."""
    line = Path(f"/proc/{child}/cmdline").read_bytes().decode()
    if "memory.keeper" in line:
        return int(line.split("memory.keeper\0")[1].split("\0")[0])
    rank = re.search(r'"rank": (\d+)', line)
    return None if rank is None else int(rank[1]) // EACH


def kill_node(command_pid: int, node: int) -> int:
    """Kills every process of ``node`` with SIGKILL and returns how many there were."""
    every = [child.pid for child in psutil.Process(command_pid).children(recursive=True)]
    mine = [child for child in every if node_of(child) == node]
    for child in mine:
        os.kill(child, signal.SIGKILL)
    return len(mine)


@contextmanager
def begun(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    argv = [sys.executable, "-m", "tandem.cli.main", "train", "recipe.yaml", "--machine.threads=1"]
    process = subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_rows(folder: Path, count: int) -> None:
    ends, path = time.monotonic() + 200, folder / "run" / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < ends
        time.sleep(0.02)


def wait_for_tier(folder: Path, tier: str, step: int) -> None:
    """Waits until ``tier`` has a checkpoint of ``step`` or later: some are left out while the first one of the folder is being written."""
    ends = time.monotonic() + 200
    while not any(state.tier == tier and state.step >= step for state in tiers_of(folder / "run")):
        assert time.monotonic() < ends
        time.sleep(0.02)


def wait_for_checkpoint(folder: Path, step: int) -> None:
    ends = time.monotonic() + 200
    while not (folder / "run" / "checkpoints" / f"step-{step}").exists():
        assert time.monotonic() < ends
        time.sleep(0.02)


def loaded(folder: Path) -> list[dict[str, Any]]:
    with Journal(folder / "run" / "journal.sqlite", read_only=True) as journal:
        return [event.detail for event in journal.events() if event.kind == "checkpoint_loaded"]


def assert_as(folder: Path, undisturbed: Path) -> None:
    model = "run/model/model.safetensors"
    assert (folder / model).read_bytes() == (undisturbed / model).read_bytes() and rows(folder / "run") == rows(undisturbed / "run")


@pytest.mark.parametrize("node", range(NODES))
def test_a_node_that_is_killed_is_replaced_from_the_memory_of_its_peer_with_no_checkpoint_in_the_folder(
    node: int, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    write(tmp_path, data, memory_every_steps=1)
    with begun(tmp_path) as process:
        wait_for_tier(tmp_path, "memory", 5)
        (tmp_path / "run" / "checkpoints").rename(tmp_path / "away")
        assert kill_node(process.pid, node) == 1 + EACH
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 0 and "is loaded from the memory of the nodes" in output, output
    [event] = loaded(tmp_path)
    assert event["tier"] == "memory" and event["step"] >= 5 and set(event["where"].values()) == {str(1 - node)}
    assert event["read_bytes"] == {"memory": event["bytes"], "folder": 0} and event["bytes"] > 0
    assert "are on one machine" in output, "it says what the memory does not survive"
    assert_as(tmp_path, undisturbed)


def test_without_any_memory_left_the_newest_checkpoint_of_the_folder_is_taken(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    write(tmp_path, data, memory_every_steps=1, every_steps=5)
    with begun(tmp_path) as process:
        wait_for_rows(tmp_path, 12)
        # It is written while training goes on.
        wait_for_checkpoint(tmp_path, 10)
        assert kill_node(process.pid, 0) == kill_node(process.pid, 1) == 1 + EACH
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    [event] = loaded(tmp_path)
    assert event["tier"] == "folder" and event["step"] % 5 == 0 and event["step"] >= 10
    assert_as(tmp_path, undisturbed)


def test_without_a_whole_checkpoint_in_the_folder_the_copy_in_storage_is_taken(data: Path, tmp_path: Path) -> None:
    write(tmp_path, data, steps=6, every_steps=2, upload=str(tmp_path / "copies"))
    command("train", "recipe.yaml", "--machine.threads=1", folder=tmp_path)
    model = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    forget_end(tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").glob("step-*/rank-00000.safetensors"):
        data_of = bytearray(path.read_bytes())
        data_of[-1] ^= 1
        path.write_bytes(data_of)
    said = command("resume", "run", folder=tmp_path)
    assert "no checkpoint in the run's folder is whole; that of step 6 is fetched from" in said
    assert loaded(tmp_path)[-1]["tier"] == "upload"
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == model and json.dumps(rows(tmp_path / "run"))


def test_a_run_whose_processes_are_all_killed_goes_on_from_its_local_disk_with_the_same_bits(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    write(tmp_path, data, memory_every_steps=1, local_directory=str(tmp_path / "nvme"), local_every_steps=2)
    with begun(tmp_path) as process:
        wait_for_tier(tmp_path, "local", 8)
        every = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        for pid in every:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    said = command("resume", "run", folder=tmp_path)
    assert "is loaded from the local disk" in said
    [event] = loaded(tmp_path)
    assert event["tier"] == "local" and event["step"] >= 8 and event["read_bytes"] == {"memory": 0, "local": event["bytes"], "folder": 0}
    assert list((tmp_path / "nvme").iterdir()) == [], "a run that has finished leaves nothing there"
    assert_as(tmp_path, undisturbed)
