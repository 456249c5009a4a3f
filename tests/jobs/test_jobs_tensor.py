"""``tandem train`` on ranks that divide the matrices, the tokens or the experts of a model: the results of one process."""

import math
from pathlib import Path
from typing import Any

import pytest
from data_runs import command, refused, rows
from package_data import make_datasets
from pretrain_recipe import write_recipe
from safetensors.torch import load_file
from sharded import tensors_of

STEPS = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_datasets(tmp_path_factory.mktemp("data"), "json", vocabulary=301)


def recipe_in(folder: Path, data: Path, **create: Any) -> str:
    """Writes the recipe of a run in ``folder``/run."""
    recipe = write_recipe(
        folder, data, create={"num_attention_heads": 4, "num_key_value_heads": 2, **create},
        data={"train": [{"path": str(data / "json")}], "held_out": str(data / "json"), "global_batch_size": 6},
        trainer={"weight_decay": 0.1, "micro_batch_tokens": 100}, evaluation={"every_steps": STEPS, "sequences": 5},
        checkpoint={"every_steps": 3, "keep": 9}, run={"max_steps": STEPS},
    )  # fmt: skip
    return str(recipe)


def run(folder: Path, data: Path, *arguments: str, **create: Any) -> str:
    """Trains in ``folder``/run; returns the output."""
    return command("train", recipe_in(folder, data, **create), *arguments)


def check_same_run(folder: Path, other: Path, close: float = 2e-5) -> None:
    found, wanted = rows(folder / "run"), rows(other / "run")
    assert [row["step"] for row in found] == list(range(STEPS))
    assert wanted[0]["train/loss"] - wanted[-1]["train/loss"] > 0.1, "it learns, so equal curves mean something"
    for mine, its in zip(found, wanted, strict=True):
        for name in ("train/loss", "train/entropy", "actor/grad_norm"):
            assert math.isclose(mine[name], its[name], rel_tol=close), (mine["step"], name, mine[name], its[name])
    for read, saved in ((load_file, "model/model.safetensors"), (tensors_of, f"checkpoints/step-{STEPS}")):
        ours, theirs = read(folder / "run" / saved), read(other / "run" / saved)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert (ours[name] - tensor).abs().max() < 0.1 * 3e-3, name


@pytest.fixture(scope="module")
def one(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    run(folder, data)
    return folder


@pytest.mark.full
def test_tensor_ranks_have_the_run_of_one_process_which_goes_on_from_their_checkpoint(one: Path, data: Path, tmp_path: Path) -> None:
    fault = ["--run.max_restarts=0", "--fault=rank1:before:train:4"]
    command("train", recipe_in(tmp_path, data), "--parallel.tensor=2", "--trainer.recompute=selective", *fault, status=1)
    command("resume", str(tmp_path / "run"), "--parallel.tensor=1")
    check_same_run(tmp_path, one)


@pytest.mark.full
def test_residual_stream_is_divided_where_the_recipe_says_so_with_the_same_curve(one: Path, data: Path, tmp_path: Path) -> None:
    collectives = []
    for value in ("true", "false"):
        (tmp_path / value).mkdir()
        run(tmp_path / value, data, "--parallel.tensor=2", f"--parallel.sequence_parallel={value}")
        check_same_run(tmp_path / value, one)
        collectives.append(rows(tmp_path / value / "run", every_key=True)[1]["comm/collectives"])
    # A sum of this size is one exchange if all ranks need the result, and a reduce-scatter and an all-gather if they divide its rows.
    assert collectives[0] > collectives[1]


@pytest.mark.full
def test_deterministic_tensor_ranks_take_the_first_step_with_the_loss_bits_of_one_process(one: Path, data: Path, tmp_path: Path) -> None:
    run(tmp_path, data, "--parallel.tensor=2", "--parallel.deterministic=true")
    assert rows(tmp_path / "run")[0]["train/loss"] == rows(one / "run")[0]["train/loss"]
    check_same_run(tmp_path, one)


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        ["--parallel.context=2", "--parallel.zero=1", "--trainer.recompute=full"],
        ["--parallel.tensor=2", "--parallel.data=2", "--parallel.zero=3"],
        ["--parallel.tensor=2", "--parallel.pipeline=2"],
        ["--parallel.tensor=2", "--parallel.pipeline=2", "--parallel.data=2"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_products_have_the_run_of_one_process(one: Path, data: Path, tmp_path: Path, arguments: list[str]) -> None:
    run(tmp_path, data, *arguments)
    check_same_run(tmp_path, one)


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [["--parallel.data=2"], ["--parallel.data=2", "--parallel.tensor=2"], ["--parallel.data=2", "--parallel.pipeline=2"]],
    ids=lambda arguments: " ".join(arguments),
)
def test_divided_and_balanced_experts_have_the_run_of_one_process(data: Path, tmp_path: Path, arguments: list[str]) -> None:
    sparse = {"architecture": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 32}
    balance = ["--trainer.router_bias_rate=0.01"]
    (tmp_path / "one").mkdir()
    (tmp_path / "ranks").mkdir()
    run(tmp_path / "one", data, *balance, **sparse)
    run(tmp_path / "ranks", data, *balance, "--parallel.expert=2", *arguments, **sparse)
    check_same_run(tmp_path / "ranks", tmp_path / "one")
    assert [row["router/max_overload"] for row in rows(tmp_path / "ranks" / "run")] == [row["router/max_overload"] for row in rows(tmp_path / "one" / "run")]


HYBRID = {"architecture": "qwen3_next", "num_hidden_layers": 4, "num_experts": 4, "moe_intermediate_size": 32}
"""The first three layers have linear attention, of 2 key heads."""


@pytest.fixture(scope="module")
def one_hybrid(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    run(folder, data, **HYBRID)
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["tensor=2"], ["pipeline=2", "tensor=1"]),
        (["pipeline=2", "tensor=2"], ["data=2", "expert=2", "pipeline=1", "tensor=1"]),
        (["data=2", "expert=2", "tensor=2"], ["data=1", "expert=1", "tensor=1"]),
    ],
    ids=lambda mesh: " ".join(mesh),
)
def test_a_mesh_of_a_hybrid_has_the_run_of_one_process_and_another_mesh_goes_on_from_its_checkpoint(
    one_hybrid: Path, data: Path, tmp_path: Path, before: list[str], after: list[str]
) -> None:
    fault = ["--run.max_restarts=0", "--fault=rank1:before:train:4"]
    command("train", recipe_in(tmp_path, data, **HYBRID), *(f"--parallel.{axis}" for axis in before), *fault, status=1)
    command("resume", str(tmp_path / "run"), *(f"--parallel.{axis}" for axis in after))
    check_same_run(tmp_path, one_hybrid)


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parallel.context=4"], "'parallel.context' is 4, which does not divide the 2 key heads of linear attention on each of 1 tensor"),
        (["--parallel.tensor=4"], "'parallel.tensor' is 4, which does not divide the model's linear attention's num_key_heads 2; 2 does"),
    ],
)
def test_what_does_not_divide_a_hybrid_is_refused_in_one_line(data: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    assert said in refused("train", recipe_in(tmp_path, data, **HYBRID, num_key_value_heads=4), *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parallel.tensor=4"], "'parallel.tensor' is 4, which does not divide the model's num_key_value_heads 2; 2 does"),
        (["--parallel.data=2", "--parallel.expert=2"], "this qwen3 model has no experts: leave it at 1"),
        (["--parallel.tensor=2", "--trainer.optimizer=muon", "--trainer.offload=nvme"], "trainer.optimizer is 'muon'"),
        (["--trainer.router_bias_rate=0.1"], "this qwen3 model has no experts: leave it at 0"),
        (["--trainer.recompute=some"], "trainer.recompute"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_in_one_line(data: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    assert said in refused("train", recipe_in(tmp_path, data), *arguments)
