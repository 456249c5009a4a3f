"""Offload together with a mesh, by the real command: the bits of the same ranks in memory though one of them is killed, nothing left in the
folder, checkpoints that any other mesh goes on from; what is predicted, and what is refused."""

import shutil
from pathlib import Path

import pytest
from test_jobs_ranks import (  # noqa: F401 - fixtures too
    SYNCHRONOUS,
    TWO_HEADS,
    command,
    data,
    is_curve_of,
    is_same_run,
    one,
    recoveries,
    run,
    write_recipe,
)

from tandem.config.recipe import load_config
from tandem.jobs.pretrain_inputs import check_pretraining
from tandem.types import UserError

# Activations of at least 64 KiB are offloaded.
WIDE = ("--model.create.intermediate_size=512", TWO_HEADS)
ALL = ("offload", "offload_parameters", "offload_activations")
MESHES = {
    "data=2 zero=0": ("offload", "offload_activations"),
    "data=2 zero=2": ("offload", "offload_activations"),
    "data=2 zero=3": ALL,
    "tensor=2": ("offload", "offload_activations"),
    "pipeline=2": ("offload", "offload_activations"),
}


def offload(names: tuple[str, ...], folder: Path) -> list[str]:
    return [*(f"--trainer.{name}=nvme" for name in names), f"--trainer.offload_folder={folder}"]


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
def test_offloaded_ranks_of_which_one_is_killed_have_the_bits_of_ranks_in_memory(mesh: str, data: Path, tmp_path: Path) -> None:  # noqa: F811
    plain, paged, away = tmp_path / "plain", tmp_path / "paged", tmp_path / "away"
    plain.mkdir()
    paged.mkdir()
    axes = [f"--parallel.{axis}" for axis in mesh.split()]
    run(plain, data, *WIDE, *axes)
    run(paged, data, *WIDE, *axes, *offload(MESHES[mesh], away), "--fault=rank1:before:optimizer:8")
    assert [event["ranks"] for event in recoveries(paged)] == [[1]]
    assert is_same_run(paged, plain) and list(away.iterdir()) == []


@pytest.mark.full
def test_any_mesh_goes_on_from_checkpoints_of_offloaded_ranks_with_and_without_offload(one: Path, data: Path, tmp_path: Path) -> None:  # noqa: F811
    first, second, away = tmp_path / "first", tmp_path / "second", tmp_path / "away"
    first.mkdir()
    stop = ("--run.restart_budget=0", SYNCHRONOUS)
    run(first, data, "--parallel.data=2", "--parallel.zero=3", *offload(ALL, away), *stop, "--fault=rank0:before:train:5", status=1)
    shutil.copytree(first, second)
    none = [f"--trainer.{name}=none" for name in ALL]
    command(first, "resume", "run", "--parallel.data=2", "--parallel.zero=1", *none, "--trainer.offload_folder=")
    command(second, "resume", "run", "--parallel.data=2", "--parallel.zero=1", *none[1:])
    assert is_same_run(first, second) and is_curve_of(first, one)
    third = tmp_path / "third"
    third.mkdir()
    run(third, data, *stop, "--parallel.data=2", "--fault=rank0:before:train:5", status=1)
    command(third, "resume", "run", "--parallel.data=3", "--parallel.zero=3", *offload(ALL, away), "--fault=rank0:before:train:10", status=1)
    command(third, "resume", "run", "--parallel.data=1", "--parallel.zero=0")
    assert is_curve_of(third, one) and list(away.iterdir()) == []


def lines(folder: Path, data: Path, *overrides: str) -> list[str]:  # noqa: F811
    write_recipe(folder, data)
    return check_pretraining(load_config(folder / "recipe.yaml", list(overrides)))  # type: ignore[arg-type]


LARGE = ("model.create.hidden_size=1024", "model.create.num_layers=20", "model.create.intermediate_size=2048", "model.create.num_heads=8")


def figure(said: list[str], label: str) -> int:
    (line,) = [line for line in said if line.startswith(label)]
    return int(line.removeprefix(label).split()[0].replace(",", ""))


def test_folder_is_to_hold_what_all_ranks_of_the_machine_put_there(data: Path, tmp_path: Path) -> None:  # noqa: F811
    def offloaded(*overrides: str) -> int:
        return figure(lines(tmp_path, data, *LARGE, f"trainer.offload_folder={tmp_path / 'away'}", *overrides), "offloaded:")

    moments, two = ("trainer.offload=nvme",), "parallel.data=2"
    alone = offloaded(*moments)
    # Of 5 times the weights: 2 are moments, 3 the staged copy of a checkpoint. Each of two ranks has all moments, unless they are cut.
    assert abs(offloaded(*moments, two) - 7 / 5 * alone) < 3
    assert all(abs(offloaded(*moments, two, f"parallel.zero={zero}") - alone) < 3 for zero in (1, 2, 3))
    assert abs(offloaded(*moments, two, "parallel.ranks_per_node=1") - 7 / 10 * alone) < 3
    # Weights and gradients of the layers are cut too; the model is exported from a copy.
    weights = offloaded(*moments, two, "parallel.zero=3", "trainer.offload_parameters=nvme") - alone
    assert 2.8 / 5 * alone < weights < 3 / 5 * alone
    # The first of two stages has half the layers of two passes, the second of one.
    activations = ("trainer.offload_activations=nvme",)
    assert abs(offloaded(*activations, "parallel.pipeline=2") - 3 / 2 * offloaded(*activations)) < 3


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("trainer.offload=nvme", "trainer.offload_parameters=nvme", "parallel.data=2"), "set parallel.zero to 3, or trainer.offload_parameters to none"),
        (("trainer.offload=nvme", "trainer.offload_parameters=nvme", "parallel.tensor=2"), "set parallel.zero to 3 and parallel.data to 2"),
        (("trainer.offload_activations=nvme", "parallel.pipeline=2", "parallel.schedule=gpipe"), "set parallel.schedule to 1f1b"),
        (("trainer.offload=nvme", "trainer.optimizer=muon", "parallel.data=2"), "trainer.optimizer is 'muon'"),
    ],
)
def test_offload_that_ranks_cannot_have_is_refused_in_one_line(overrides: tuple[str, ...], said: str, data: Path, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(UserError) as caught:
        lines(tmp_path, data, TWO_HEADS.removeprefix("--"), *overrides)
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1
