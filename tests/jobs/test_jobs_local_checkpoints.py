"""Checkpoints on the local disk of a run that is one process, with the real command: killed, it goes on from there with the same bits; on a full disk it goes
on without the tier, and says so once."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_runs import command, rows
from package_data import make_datasets
from pretrain_recipe import write_recipe

from tandem.runtime.records.checkpoint_tiers import tiers_of
from tandem.runtime.records.journal import Journal

pytestmark = pytest.mark.full
STEPS = 90


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_datasets(tmp_path_factory.mktemp("data"), "json")


def write(folder: Path, data: Path, **checkpoint: Any) -> None:
    write_recipe(
        folder, data, data={"train": [{"path": str(data / "json")}], "global_batch_size": 7}, trainer={"micro_batch_tokens": 100},
        evaluation={"every_steps": 1000}, checkpoint={"every_steps": 1000, **checkpoint}, run={"max_steps": STEPS},
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    write(folder, data)
    command("train", "recipe.yaml", "--machine.threads=1", folder=folder)
    return folder


def assert_as(folder: Path, undisturbed: Path) -> None:
    model = "run/model/model.safetensors"
    assert (folder / model).read_bytes() == (undisturbed / model).read_bytes() and rows(folder / "run") == rows(undisturbed / "run")


def test_one_process_that_is_killed_goes_on_from_the_local_disk(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    write(tmp_path, data, local_directory=str(tmp_path / "nvme"), local_every_steps=3)
    argv = [sys.executable, "-m", "tandem.cli.main", "train", "recipe.yaml", "--machine.threads=1"]
    process = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ends = time.monotonic() + 200
    while not any(state.tier == "local" and state.step >= 9 for state in tiers_of(tmp_path / "run")):
        assert process.poll() is None and time.monotonic() < ends
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert "is loaded from the local disk" in command("resume", "run", folder=tmp_path)
    with Journal(tmp_path / "run" / "journal.sqlite", read_only=True) as journal:
        [loaded] = [event.detail for event in journal.events() if event.kind == "checkpoint_loaded"]
    assert loaded["tier"] == "local" and loaded["step"] % 3 == 0 and loaded["step"] >= 9 and loaded["read_bytes"]["folder"] == 0
    assert_as(tmp_path, undisturbed)


@pytest.fixture
def small_disk(small_disk: Callable[[str], Path]) -> Path:
    return small_disk("64k")


def test_a_run_whose_local_disk_is_full_says_so_once_and_ends_with_the_same_bits(data: Path, undisturbed: Path, small_disk: Path, tmp_path: Path) -> None:
    write(tmp_path, data, local_directory=str(small_disk), local_every_steps=3)
    said = command("train", "recipe.yaml", "--machine.threads=1", folder=tmp_path)
    assert said.count("tier local takes no more checkpoints") == 1 and "no space left in" in said
    assert {state.tier: bool(state.left_out) for state in tiers_of(tmp_path / "run")} == {"local": True, "folder": False}
    assert_as(tmp_path, undisturbed)
