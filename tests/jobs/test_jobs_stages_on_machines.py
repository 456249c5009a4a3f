"""A run on data with the pipeline stages of a replica on several machines, through a real etcd: the bits of one machine, whatever dies."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from data_runs import command, rows
from etcd_server import WHY_SKIPPED, EtcdServer, program
from machines_of_data import DataMachines
from package_data import make_datasets
from pretrain_recipe import write_recipe
from sharded import is_same

from tandem.runtime.records.checkpoint_tiers import tiers_of

pytestmark = [pytest.mark.full, pytest.mark.skipif(program() is None, reason=WHY_SKIPPED)]
STEPS, LATER = 10, 60
"""Steps of a run without faults, and of one that is struck after its first checkpoint."""
RARE = "--checkpoint.every_steps=1000"
"""Of the run's folder: no checkpoint before the end."""
INTERLEAVED = ("--parallel.schedule=interleaved", "--parallel.virtual_stages=2", "--model.create.num_hidden_layers=4")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_datasets(tmp_path_factory.mktemp("data"), "json", "held-out")


@pytest.fixture
def machines(data: Path, etcd: EtcdServer, tmp_path: Path) -> Iterator[DataMachines]:
    write(tmp_path, data)
    made = DataMachines(tmp_path, etcd)
    yield made
    made.close()


def write(folder: Path, data: Path) -> None:
    # The head is tied to the embedding, of which the first and the last stage then have a copy each.
    write_recipe(
        folder, data, data={"train": [{"path": str(data / "json")}], "held_out": str(data / "held-out"), "global_batch_size": 6},
        trainer={"warmup_steps": 3, "micro_batch_tokens": 100}, run={"max_steps": STEPS}, checkpoint={"every_steps": 4, "keep": 2},
        create={"tie_word_embeddings": True}, evaluation={"every_steps": 5, "sequences": 4}, parallel={"heartbeat_timeout_s": 4.0},
    )  # fmt: skip


def wait_for_checkpoint(machines: DataMachines, tier: str) -> None:
    ends = time.monotonic() + 120
    while not [each for each in tiers_of(machines.directory) if each.tier == tier and each.step >= 4]:
        assert time.monotonic() < ends and machines.commands["train"].poll() is None, machines.said("train")
        time.sleep(0.02)


def assert_has_the_bits_of_one_machine(machines: DataMachines, data: Path, folder: Path, settings: tuple[str, ...], steps: int) -> None:
    write(folder, data)
    command("train", "recipe.yaml", *settings, folder=folder)
    run, other = machines.directory, folder / "run"
    assert rows(run) == rows(other) and len(rows(run)) == steps
    assert (run / "model/model.safetensors").read_bytes() == (other / "model/model.safetensors").read_bytes()
    assert is_same(run / f"checkpoints/step-{steps}", other / f"checkpoints/step-{steps}")


@pytest.mark.parametrize("more", [(), INTERLEAVED], ids=["1f1b", "interleaved"])
def test_two_stages_on_two_machines_have_the_bits_of_two_on_one(more: tuple[str, ...], data: Path, machines: DataMachines, tmp_path: Path) -> None:
    mesh = ("--parallel.data=1", "--parallel.pipeline=2", *more)
    machines.settings = mesh
    machines.begin("plan", "train", "recipe.yaml", *machines.common, "--dry-run")
    assert "machine 1: ranks 1\n  across machines: pipeline" in machines.ended("plan")
    machines.pod("b")
    machines.train()
    machines.ended("train")
    assert "pod b trains with rank 1" in machines.ended("b")
    assert machines.events("recovery") == [] and machines.left_behind() == []
    assert_has_the_bits_of_one_machine(machines, data, tmp_path / "other", mesh, STEPS)


@pytest.mark.parametrize("tier", ["folder", "memory"])
def test_a_spare_has_the_stages_of_one_of_four_machines_that_is_killed(tier: str, data: Path, machines: DataMachines, tmp_path: Path) -> None:
    mesh = ("--parallel.data=2", "--parallel.pipeline=2", "--parallel.zero=1", f"--run.max_steps={LATER}")
    machines.count, machines.settings = 4, (*mesh, "--cluster.spares=1", *((RARE, "--checkpoint.memory_every_steps=1") if tier == "memory" else ()))
    for number, name in enumerate("bcde", 2):
        machines.pod(name, f"--pods.host=127.0.0.{number}")
    machines.train()
    machines.wait_for_step(6)
    if tier == "memory":
        wait_for_checkpoint(machines, tier)
    # Between the stage on the run's own machine, of the same replica, and the loss.
    [lost] = [name for name in "bcde" if "trains with rank 2" in machines.said(name)]
    for pid in machines.processes(lost):
        os.kill(pid, signal.SIGKILL)
    machines.commands.pop(lost).wait()
    machines.ended("train")
    others = "".join(machines.ended(name) for name in "bcde".replace(lost, ""))
    assert all(f"trains with rank {rank}" in others for rank in (1, 2, 3))
    assert len(machines.events("recovery")) == 1 and machines.left_behind() == []
    loaded = machines.events("checkpoint_loaded")[-1].detail
    assert loaded["tier"] == tier and loaded["step"] >= 4 and bool(loaded["read_bytes"].get("folder", 0)) == (tier == "folder")
    assert_has_the_bits_of_one_machine(machines, data, tmp_path / "other", mesh, LATER)


def test_each_stage_has_its_state_from_the_disk_of_its_own_machine(data: Path, machines: DataMachines, tmp_path: Path) -> None:
    mesh = ("--parallel.data=1", "--parallel.pipeline=2", f"--run.max_steps={LATER}")
    machines.settings = (*mesh, RARE, f"--checkpoint.local_directory={tmp_path / 'disk'}", "--checkpoint.local_every_steps=2")
    machines.pod("b", "--pods.host=127.0.0.2")
    machines.train()
    machines.wait_for_step(1)
    wait_for_checkpoint(machines, "local")
    for pid in [pid for pid, line in machines.processes("b").items() if "data_rank" in line]:
        os.kill(pid, signal.SIGKILL)
    machines.ended("train")
    loaded = machines.events("checkpoint_loaded")[-1].detail
    assert loaded["tier"] == "local" and loaded["step"] >= 4
    assert machines.ended("b") and machines.left_behind() == []
    assert_has_the_bits_of_one_machine(machines, data, tmp_path / "other", mesh, LATER)


def test_a_wrong_bit_in_a_stage_is_seen_by_the_machines_of_another_replica(data: Path, machines: DataMachines, tmp_path: Path) -> None:
    mesh = ("--parallel.data=2", "--parallel.pipeline=2")
    machines.count, machines.settings = 4, (*mesh, "--trainer.corruption_check=1.0")
    for name in "bcd":
        machines.pod(name)
    machines.train("--fault=rank0:flip:gradient:6")
    machines.ended("train")
    [wrong] = machines.events("silent_corruption")
    # Of the replica whose stages are ranks 0 and 2.
    assert wrong.detail["step"] == 6 and 0 in wrong.detail["ranks"] and {*wrong.detail["ranks"]} <= {0, 2}
    assert all(machines.ended(name) for name in "bcd") and machines.left_behind() == []
    assert_has_the_bits_of_one_machine(machines, data, tmp_path / "other", mesh, STEPS)
