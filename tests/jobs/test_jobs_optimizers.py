"""``tandem train`` with Muon and 8-bit AdamW on several ranks: the results of one process, the same bits after a death, and resumes on
other ranks."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from data_runs import command, rows
from package_data import make_datasets
from pretrain_recipe import write_recipe
from sharded import is_same, tensors_of

from tandem.config.recipe import load_config
from tandem.jobs.start import train

STEPS = 6
SPARSE = {"architecture": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 32}
FOUR = ("--parallel.data=2", "--parallel.tensor=2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_datasets(tmp_path_factory.mktemp("data"), "json", vocabulary=301)


def write_optimizer_recipe(folder: Path, data: Path, optimizer: str, **create: Any) -> Path:
    return write_recipe(
        folder, data, create={"num_attention_heads": 4, "num_key_value_heads": 2, **create},
        data={"train": [{"path": str(data / "json")}], "global_batch_size": 6}, trainer={"weight_decay": 0.1, "optimizer": optimizer},
        checkpoint={"every_steps": 3, "keep": 9, "asynchronous": False}, run={"max_steps": STEPS},
    )  # fmt: skip


def alone(folder: Path, data: Path, optimizer: str, **create: Any) -> Path:
    """Runs it in this process."""
    before = torch.get_num_threads()
    train(load_config(write_optimizer_recipe(folder, data, optimizer, **create)))
    torch.set_num_threads(before)
    return folder


def check_curve(folder: Path, other: Path, close: float) -> None:
    found, wanted = rows(folder / "run"), rows(other / "run")
    assert [row["step"] for row in found] == list(range(STEPS))
    assert wanted[0]["train/loss"] - wanted[-1]["train/loss"] > 0.1, "it learns, so equal curves mean something"
    for mine, its in zip(found, wanted, strict=True):
        assert math.isclose(mine["train/loss"], its["train/loss"], rel_tol=close), (mine["step"], mine["train/loss"], its["train/loss"])


@pytest.mark.full
def test_muon_on_tensor_ranks_has_the_curve_of_one_process(data: Path, tmp_path: Path) -> None:
    one = alone(tmp_path / "one", data, "muon")
    command("train", str(write_optimizer_recipe(tmp_path / "ranks", data, "muon")), "--parallel.tensor=2")
    check_curve(tmp_path / "ranks", one, 2e-5)
    ours, theirs = (tensors_of(tmp_path / name / "run" / "checkpoints" / f"step-{STEPS}") for name in ("ranks", "one"))
    assert ours.keys() == theirs.keys() and any(name.startswith("momentum/") for name in theirs)


@pytest.mark.full
@pytest.mark.parametrize(
    ("optimizer", "mesh", "create"),
    [
        ("muon", (*FOUR, "--parallel.zero=3"), {}),
        ("muon", ("--parallel.data=2", "--parallel.expert=2", "--parallel.zero=1"), SPARSE),
        ("muon", ("--parallel.tensor=2", "--parallel.pipeline=2"), {}),
        ("adamw8bit", ("--parallel.data=3", "--parallel.zero=2"), {}),
        ("adamw8bit", ("--parallel.data=2", "--parallel.expert=2", "--parallel.zero=3"), SPARSE),
        ("adamw8bit", ("--parallel.data=2", "--parallel.pipeline=2", "--parallel.zero=1"), {}),
    ],
    ids=["muon, 3", "muon, experts, 1", "muon, pipeline", "8 bits, 2", "8 bits, experts, 3", "8 bits, pipeline, 1"],
)
def test_every_mesh_has_the_curve_of_one_process(optimizer: str, mesh: tuple[str, ...], create: Any, data: Path, tmp_path: Path) -> None:
    one = alone(tmp_path / "one", data, optimizer, **create)
    command("train", str(write_optimizer_recipe(tmp_path / "ranks", data, optimizer, **create)), *mesh)
    # A code differs if the last bit of its moment does.
    check_curve(tmp_path / "ranks", one, 2e-5 if optimizer == "muon" else 1e-4)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["muon", "adamw8bit"])
def test_killed_rank_leaves_the_same_bits_and_one_process_goes_on_from_four(optimizer: str, data: Path, tmp_path: Path) -> None:
    for name, fault in (("whole", ()), ("killed", ("--fault=rank2:before:train:4",)), ("cut", ("--fault=rank2:before:train:4", "--run.max_restarts=0"))):
        recipe = write_optimizer_recipe(tmp_path / name, data, optimizer)
        command("train", str(recipe), *FOUR, "--parallel.zero=2", *fault, status=int(name == "cut"))
    whole, killed, cut = (tmp_path / name for name in ("whole", "killed", "cut"))
    assert rows(killed / "run") == rows(whole / "run") and is_same(killed / "run/checkpoints/step-6", whole / "run/checkpoints/step-6")
    is_coded = any("_codes/" in name and "@tensor-1-of-2" in name for name in tensors_of(whole / "run/checkpoints/step-6"))
    assert is_coded == (optimizer == "adamw8bit")
    command("resume", str(cut / "run"), "--parallel.data=1", "--parallel.tensor=1", "--parallel.zero=0")
    # 8-bit moments of differently sharded matrices are encoded again.
    check_curve(cut, whole, 2e-5 if optimizer == "muon" else 2e-3)
