"""Offload on a mesh with the real command: the bits of the same ranks in memory even if one is killed, nothing left in the folder,
checkpoints that any other mesh continues from, predictions, and refusals."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from data_runs import command
from test_jobs_ranks import (  # noqa: F401 - fixtures too
    SYNCHRONOUS,
    TWO_HEADS,
    data,
    is_curve_of,
    is_same_run,
    one,
    recoveries,
    run,
    write_ranks_recipe,
)

from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import load_config
from tandem.estimate.training.layout import TrainingLayout, layout_of_trainer
from tandem.estimate.training.rank_memory import predict_rank_memory
from tandem.jobs.checks.check_data import check_data_run
from tandem.model.create_model import create_model
from tandem.model.huggingface.model_config import read_shapes
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
    "pipeline=2 data=2 zero=3": ALL,
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
    stop = ("--run.max_restarts=0", SYNCHRONOUS)
    run(first, data, "--parallel.data=2", "--parallel.zero=3", *offload(ALL, away), *stop, "--fault=rank0:before:train:5", status=1)
    assert "cannot change when a run is resumed" in command("resume", "run", "--trainer.learning_rate=1", status=2, folder=first)
    shutil.copytree(first, second)
    none = [f"--trainer.{name}=none" for name in ALL]
    command("resume", "run", "--parallel.data=2", "--parallel.zero=1", *none, "--trainer.offload_folder=", folder=first)
    command("resume", "run", "--parallel.data=2", "--parallel.zero=1", *none[1:], folder=second)
    assert is_same_run(first, second) and is_curve_of(first, one)
    third = tmp_path / "third"
    third.mkdir()
    run(third, data, *stop, "--parallel.data=2", "--fault=rank0:before:train:5", status=1)
    command("resume", "run", "--parallel.data=3", "--parallel.zero=3", *offload(ALL, away), "--fault=rank0:before:train:10", status=1, folder=third)
    command("resume", "run", "--parallel.data=1", "--parallel.zero=0", folder=third)
    assert is_curve_of(third, one) and list(away.iterdir()) == []


WIDTHS = {
    "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1536
}


def resident(
    folder: Path, data: Path, start: Path, mesh: list[str], names: tuple[str, ...] = (), memory_gib: float = 0  # noqa: F811
) -> tuple[int, int, int]:
    """Returns (resident bytes of the first rank after two steps, predicted bytes of the training, predicted peak of the process)."""
    folder.mkdir()
    write_ranks_recipe(folder, data)
    content = yaml.safe_load((folder / "recipe.yaml").read_text())
    # With no supervisor to limit it, freed memory is kept.
    recipe = content | {"model": {"path": str(start)}, "data": content["data"] | {"held_out": ""}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    size = ["--machine.threads=1", f"--machine.memory_gib={memory_gib}", "--run.max_steps=2", "--checkpoint.every_steps=100"]
    overrides = [*mesh, *size, *(f"--trainer.{name}=nvme" for name in names)]
    command("train", "recipe.yaml", *overrides, folder=folder)
    loaded = load_config(folder / "recipe.yaml", overrides)
    assert isinstance(loaded, PretrainRecipe)
    measured = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])["memory/train/measured"]
    predicted = predict_rank_memory(read_shapes(start), layout_of(loaded))
    return int(measured), predicted.allocated - predicted.staged, predicted.total


def layout_of(recipe: PretrainRecipe) -> TrainingLayout:
    return layout_of_trainer(recipe.trainer, recipe.parallel, recipe.most_tokens)


@pytest.mark.full
def test_resident_size_of_a_rank_is_smaller_by_what_is_predicted(data: Path, tmp_path: Path) -> None:  # noqa: F811
    write_ranks_recipe(tmp_path, data)
    recipe = load_config(tmp_path / "recipe.yaml", [f"--model.create.{name}={value}" for name, value in WIDTHS.items()])
    assert isinstance(recipe, PretrainRecipe) and recipe.model.create is not None
    create_model(recipe.model.create, 3, tmp_path / "start")
    for zero, choices in ((0, [("offload",)]), (3, [("offload",), ("offload", "offload_parameters")])):
        mesh = ["--parallel.data=2", f"--parallel.zero={zero}"]
        plain, of_plain, _ = resident(tmp_path / f"plain-{zero}", data, tmp_path / "start", mesh)
        for names in choices:
            paged, of_paged, most = resident(tmp_path / f"{len(names)}-{zero}", data, tmp_path / "start", mesh, names)
            assert of_plain - of_paged > 100 << 20 and plain - paged > 0.9 * (of_plain - of_paged), (zero, names, plain, paged)
            assert paged < most, (zero, names, paged, most)
    # With room for what is needed but not for freed memory, freed memory is returned.
    recipe = load_config(tmp_path / "recipe.yaml", mesh)
    assert isinstance(recipe, PretrainRecipe)
    predicted = predict_rank_memory(read_shapes(tmp_path / "start"), layout_of(recipe)).total
    small, _, _ = resident(tmp_path / "small", data, tmp_path / "start", mesh, memory_gib=1.1 * 2 * predicted / 2**30)
    assert small < plain < predicted, (small, plain, predicted)


def lines(folder: Path, data: Path, *overrides: str) -> list[str]:  # noqa: F811
    write_ranks_recipe(folder, data)
    return check_data_run(load_config(folder / "recipe.yaml", list(overrides)))  # type: ignore[arg-type]


LARGE = (
    "model.create.hidden_size=1024", "model.create.num_hidden_layers=20", "model.create.intermediate_size=2048",
    "model.create.num_attention_heads=8"
)


def figure(said: list[str], label: str) -> int:
    (line,) = [line for line in said if line.startswith(label)]
    return int(line.removeprefix(label).split()[0].replace(",", ""))


def test_folder_is_to_hold_what_all_ranks_of_the_machine_put_there(data: Path, tmp_path: Path) -> None:  # noqa: F811
    def offloaded(*overrides: str) -> int:
        return figure(lines(tmp_path, data, *LARGE, f"trainer.offload_folder={tmp_path / 'away'}", *overrides), "offloaded:")

    moments, two = ("trainer.offload=nvme",), "parallel.data=2"
    alone = offloaded(*moments)
    # Of 5 times the weights, 2 are moments and 3 the staged copy of a checkpoint. Each of two ranks has all moments unless they are sharded.
    assert abs(offloaded(*moments, two) - 7 / 5 * alone) < 3
    assert all(abs(offloaded(*moments, two, f"parallel.zero={zero}") - alone) < 3 for zero in (1, 2, 3))
    assert abs(offloaded(*moments, two, "parallel.ranks_per_node=1") - 7 / 10 * alone) < 3
    # Weights and gradients of the layers are sharded too; the model is exported from a copy.
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
