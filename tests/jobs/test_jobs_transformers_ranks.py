"""Runs with ``model.implementation: transformers`` on several ranks and through a kill, also of an adapter and of a mixture of experts."""

from pathlib import Path
from typing import Any

import module_runs
import pytest
import torch
from data_runs import command, rows, train_until_killed, write_sections
from module_runs import LONG, STEPS, TRAINER, check_read_by_transformers, rl_recipe, run_sft, sft_recipe, write_model

from tandem.jobs.start import resume

LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 16.0, "target_modules": ["query_key_value", "dense_4h_to_h"]}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {"gpt_neox": ("gpt_neox", {}), "dots1": ("dots1", {}), "adapter": ("gpt_neox", LORA)}
"""By name: the type of the model, and keys of the section ``trainer``."""


@pytest.fixture(scope="module", params=CASES)
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with the model of one of ``CASES`` and the folder of its run of 40 steps, and the case's keys."""
    model_type, trainer = CASES[request.param]
    folder = tmp_path_factory.mktemp("undisturbed")
    run_sft(folder / "whole", write_model(folder / "model", model_type), run={"max_steps": LONG}, trainer={**TRAINER, **trainer})
    return folder, trainer


def same_files(folder: Path, other: Path) -> bool:
    """Returns whether the folders of two runs have the same models and, where there is one, the same adapter."""
    files = [path.relative_to(other) for name in ("model", "adapter") for path in (other / name).glob("*.safetensors")]
    return bool(files) and all((folder / file).read_bytes() == (other / file).read_bytes() for file in files)


@pytest.mark.full
def test_a_run_that_is_killed_is_resumed_with_the_same_bits_and_transformers_reads_its_folder(
    undisturbed: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, trainer = undisturbed
    recipe = sft_recipe(tmp_path, folder / "model", run={"max_steps": LONG}, trainer={**TRAINER, **trainer})
    train_until_killed(recipe, tmp_path / "run", 5, limit_s=240)
    assert len(rows(tmp_path / "run")) < LONG
    threads = torch.get_num_threads()
    resume(tmp_path / "run")
    torch.set_num_threads(threads)
    whole = folder / "whole" / "run"
    assert rows(tmp_path / "run") == rows(whole) and rows(whole)[0]["train/loss"] > rows(whole)[-1]["train/loss"]
    assert same_files(tmp_path / "run", whole) and (whole / "adapter").exists() == bool(trainer)
    check_read_by_transformers(whole / "model")


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_two_ranks_with_and_without_shards_have_the_curve_of_one(zero: int, undisturbed: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, trainer = undisturbed
    command("train", str(sft_recipe(tmp_path, folder / "model", parallel={"data": 2, "zero": zero}, trainer={**TRAINER, **trainer})))
    expected = [row["train/loss"] for row in rows(folder / "whole" / "run")[:STEPS]]
    assert [row["train/loss"] for row in rows(tmp_path / "run")] == pytest.approx(expected, rel=1e-4)


@pytest.mark.full
def test_the_loss_of_routers_is_that_of_all_ranks_and_evens_out_what_experts_are_sent(tmp_path: Path) -> None:
    model, every = write_model(tmp_path / "model", "qwen3_moe"), 8 * 48
    runs = {}
    for name, ranks, loss in (("one", 1, 1.0), ("two", 2, 1.0), ("hardly", 1, 1e-9), ("without", 1, 0.0)):
        # Two ranks compute as many tokens at the same time as one that has all of them in a micro-batch.
        trainer = {**TRAINER, "micro_batch_tokens": every // ranks, "router_balance_loss": loss}
        command("train", str(sft_recipe(tmp_path / name, model, parallel={"data": ranks, "zero": ranks - 1}, trainer=trainer)))
        runs[name] = rows(tmp_path / name / "run")
    for key in ("train/loss", "router/max_overload"):
        assert [row[key] for row in runs["two"]] == pytest.approx([row[key] for row in runs["one"]], rel=1e-3)
    assert runs["one"][-1]["train/loss"] != runs["without"][-1]["train/loss"] and "router/max_overload" not in runs["without"][-1]
    assert runs["one"][-1]["router/max_overload"] < 0.8 * runs["hardly"][-1]["router/max_overload"]


@pytest.fixture(scope="module", params=["dots1", "adapter"])
def undisturbed_grpo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with the model of one of ``CASES`` and the folder of its run of ten steps of GRPO, and the sections of the recipe beside those of every one."""
    model_type, trainer = CASES[request.param]
    folder = tmp_path_factory.mktemp("grpo")
    changed = {
        "trainer": {**trainer, "learning_rate": 1e-2}, "rewards": {"functions": [{"function": f"{module_runs.__file__}:early_letters"}]},
        "checkpoint": {"every_steps": 3, "keep": 2}, "machine": {"threads": 1},
    }  # fmt: skip
    write_model(folder / "model", model_type)
    grpo(folder, folder / "model", changed)
    return folder, changed


def grpo(folder: Path, model: Path, changed: dict[str, Any], parallel: dict[str, Any] | None = None) -> None:
    """Writes the recipe of a run of GRPO named ``run`` in ``folder`` and trains it."""
    folder.mkdir(exist_ok=True)
    recipe = write_sections(folder, rl_recipe(model, folder, **changed), {"run": {"name": "run"}, "parallel": parallel or {}})
    command("train", str(recipe))


@pytest.mark.full
def test_grpo_that_is_killed_is_resumed_with_the_same_bits(undisturbed_grpo: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, changed = undisturbed_grpo
    recipe = write_sections(tmp_path, rl_recipe(folder / "model", tmp_path, **changed), {"run": {"name": "run"}})
    train_until_killed(recipe, tmp_path / "run", 4, limit_s=240)
    assert len(rows(tmp_path / "run")) < STEPS
    command("resume", str(tmp_path / "run"))
    whole = folder / "run"
    assert rows(tmp_path / "run") == rows(whole) and [row["mismatch_max_abs"] for row in rows(whole)] == [0.0] * STEPS
    assert any(row["actor/grad_norm"] > 0 for row in rows(whole)) and same_files(tmp_path / "run", whole)


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 2])
def test_grpo_on_two_ranks_draws_with_the_bits_of_the_trainer_and_begins_with_the_curve_of_one(
    zero: int, undisturbed_grpo: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, changed = undisturbed_grpo
    grpo(tmp_path, folder / "model", changed, {"data": 2, "zero": zero})
    ours, one = rows(tmp_path / "run"), rows(folder / "run")
    assert [row["mismatch_max_abs"] for row in ours] == [0.0] * STEPS
    # Later samples are drawn with weights whose last bits differ, and another token is drawn somewhere.
    for key in ("reward/mean", "actor/grad_norm"):
        assert [row[key] for row in ours[:2]] == pytest.approx([row[key] for row in one[:2]], rel=1e-3)
