"""Every optimizer, precision and offload from a recipe: it learns, an interrupted run continues with the same bits, and a non-finite step
is skipped and counted."""

import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from data_runs import rows
from package_data import make_datasets
from pretrain_recipe import write_recipe

from tandem.config.recipe import load_config
from tandem.jobs.checks import check_run
from tandem.jobs.start import resume, train
from tandem.kernels import select
from tandem.kernels.mixed import dot_products
from tandem.model.huggingface.model_folder import read_tensors
from tandem.runtime.callback import Callback
from tandem.trainer.bad_batch import read_batch
from tandem.types import RunError, UserError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of one package of the standard library, with a tokenizer trained on it."""
    return make_datasets(tmp_path_factory.mktemp("numerics"), "train")


class Heard(Callback):
    """Collects the messages of a run."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)


def begin(data: Path, directory: Path, *overrides: str, callback: Callback | None = None) -> Path:
    recipe = write_recipe(
        directory, data, create={"hidden_size": 64, "head_dim": 32, "intermediate_size": 96},
        data={"train": [{"path": str(data / "train")}], "global_batch_size": 4}, trainer={"micro_batch_tokens": 100},
        checkpoint={"every_steps": 3, "keep": 3}, run={"max_steps": 7},
    )  # fmt: skip
    train(load_config(recipe, list(overrides)), callbacks=[callback or Callback()])
    return directory / "run"


CHOICES = {
    "muon": ("trainer.optimizer=muon", "trainer.schedule=wsd", "trainer.decay_steps=3"),
    "adamw8bit": ("trainer.optimizer=adamw8bit",),
    "bf16": ("trainer.precision=bf16",),
    "fp16": ("trainer.precision=fp16", "trainer.loss_scale=16777216", "trainer.loss_scale_growth_steps=2"),
    "fp8": ("trainer.precision=fp8",),
    "bfloat16": ("trainer.dtype=bfloat16",),
    "float64": ("trainer.dtype=float64",),
}
SLOW = ("adamw8bit", "bfloat16", "float64")


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rows(begin(data, tmp_path_factory.mktemp("plain")))


@pytest.mark.parametrize("choice", [pytest.param(name, marks=pytest.mark.full) if name in SLOW else name for name in CHOICES])
def test_each_choice_learns_and_a_run_cut_short_goes_on_to_the_same_bits(choice: str, data: Path, plain: list[dict[str, Any]], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    heard = Heard()
    run = begin(data, tmp_path, *CHOICES[choice], callback=heard)
    assert any(f"{choice} is emulated here" in said for said in heard.said) == (choice in ("fp16", "fp8") or (choice == "bf16" and not dot_products(select())))
    whole = rows(run)
    losses = [row["train/loss"] for row in whole]
    assert losses[-1] < losses[0] - 0.2 and losses != [row["train/loss"] for row in plain]
    dtype = {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(choice, torch.float32)
    assert {tensor.dtype for _, tensor in read_tensors(run / "model")} == {dtype}
    assert abs(losses[0] - plain[0]["train/loss"]) < (0.05 if choice == "fp8" else 0.01), "the same model before the first step"
    wanted = {name: (run / name).read_bytes() for name in ("model/model.safetensors", "checkpoints/step-7/rank-00000.safetensors")}
    for folder in ("model", "checkpoints/step-7", "checkpoints/step-6"):
        shutil.rmtree(run / folder)
    resume(run)
    assert rows(run) == whole
    assert {name: (run / name).read_bytes() for name in wanted} == wanted


def test_fp16_backs_off_where_the_scale_overflows_and_grows_again(data: Path, tmp_path: Path) -> None:
    found = rows(begin(data, tmp_path, *CHOICES["fp16"], "trainer.loss_scale_growth_steps=1"))
    scales, backed_off = ([row[f"train/{name}"] for row in found] for name in ("loss_scale", "backed_off_steps"))
    assert backed_off[0] == 1 and scales[0] == 2**23, "the first gradient overflows under a scale of 2^24"
    assert any(after == 2 * before for before, after in itertools.pairwise(scales))
    assert all(math.isfinite(row["train/loss"]) for row in found) and "train/skipped_steps" not in found[-1]


@pytest.mark.full
def test_fp16_on_two_ranks_goes_on_in_one_process(data: Path, tmp_path: Path) -> None:
    """The first gradients overflow, so the checkpoint's loss scale and count of good steps differ from the initial ones."""
    run = begin(data, tmp_path, *CHOICES["fp16"], "parallel.data=2")
    whole = rows(run)
    assert whole[0]["train/backed_off_steps"] == 1 and whole[5]["train/loss_scale"] != 2**24
    for folder in ("model", "checkpoints/step-7", "checkpoints/step-6"):
        shutil.rmtree(run / folder)
    torch.set_num_threads(1)
    resume(run, overrides=["parallel.data=1"])
    found = rows(run)
    assert found[:3] == whole[:3]
    assert 0 < sum(math.isfinite(row["actor/grad_norm"]) for row in found[3:]) < 4, "steps that are taken and such that are left out"
    for now, before in zip(found[3:], whole[3:], strict=True):
        assert all(now[name] == before[name] for name in ("train/loss_scale", "train/backed_off_steps", "actor/lr"))
        for name in ("train/loss", "actor/grad_norm"):
            # Sums in another order, and the effect of fp16 on weights that differ in their last bits.
            assert math.isclose(now[name], before[name], rel_tol=2.0**-11) or not (math.isfinite(now[name]) or math.isfinite(before[name]))


def test_run_that_diverges_skips_counts_keeps_the_batches_and_stops_in_one_line(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        begin(data, tmp_path, "trainer.learning_rate=1e30", "trainer.max_skipped_steps=1")
    said = str(caught.value)
    assert len(said.splitlines()) == 1 and "trainer.max_skipped_steps (1)" in said and "lower trainer.learning_rate" in said
    found = rows(tmp_path / "run")
    assert [row.get("train/skipped_steps") for row in found] == [None, 1] and not math.isfinite(found[1]["actor/grad_norm"])
    kept = sorted((tmp_path / "run" / "skipped").iterdir())
    assert [path.name for path in kept] == ["step-1.json", "step-2.json"] and str(kept[1]) in said
    batch = read_batch(kept[0])
    # One row of loss mask per token, none for the first token of a piece; the tokens are those of the step.
    assert sum(len(s.token_ids) for s in batch) <= 4 * 48 and all(s.loss_mask[0] == 0 and all(s.loss_mask[1:]) for s in batch)


def test_offloaded_run_has_the_bits_of_one_in_memory_and_leaves_no_file(data: Path, plain: list[dict[str, Any]], tmp_path: Path) -> None:
    away = tmp_path / "away"
    run = begin(data, tmp_path, "trainer.offload=nvme", f"trainer.offload_folder={away}")
    assert rows(run) == plain and list(away.iterdir()) == []
    wanted = (run / "checkpoints/step-7/rank-00000.safetensors").read_bytes()
    shutil.rmtree(run / "checkpoints/step-7")
    resume(run)
    assert rows(run) == plain and (run / "checkpoints/step-7/rank-00000.safetensors").read_bytes() == wanted


def test_too_little_memory_or_disk_is_said_before_the_start(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*overrides: str) -> str:
        with pytest.raises(RunError) as caught:
            begin(data, tmp_path, *overrides)
        assert not (tmp_path / "run").exists() and len(str(caught.value).splitlines()) == 1
        return str(caught.value)

    # Less than the process alone.
    assert "no other value of its keys is enough, so take a smaller model" in refused("machine.memory_gib=0.0015")
    # fp32 weights, gradients and two moments of 0.1M elements are few megabytes beside the activations of so many tokens.
    assert "set trainer.micro_batch_tokens to " in refused("machine.memory_gib=0.5", "trainer.micro_batch_tokens=200000", "data.global_batch_size=2000")
    monkeypatch.setattr(check_run, "free_bytes", lambda folder: 2**23 if folder.is_relative_to(tmp_path) else 2**10)
    assert "lower checkpoint.keep or set run.directory" in refused("checkpoint.keep=50")
    assert "'trainer.offload_folder'" in refused("trainer.offload=nvme", "trainer.offload_folder=/proc", "checkpoint.keep=1")


def test_run_whose_steps_are_left_out_ends_with_a_report(data: Path, tmp_path: Path) -> None:
    heard = Heard()
    run = begin(data, tmp_path, "trainer.learning_rate=1e30", "trainer.max_skipped_steps=100", "trainer.offload=cpu", callback=heard)
    assert "trainer.offload cpu has no effect on the CPU" in heard.said[0]
    found = rows(run)
    assert sum("it is skipped (" in said for said in heard.said) == 6
    assert [row.get("train/skipped_steps") for row in found] == [None, 1, 2, 3, 4, 5, 6]
    assert '"title":"Loss"' in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.optimizer=lion", "must be one of adamw, muon, adamw8bit"),
        ("trainer.precision=int4", "must be one of fp32, bf16, fp16, fp8"),
        ("trainer.loss_scale=1000", "it must be a power of two"),
        ("trainer.max_skipped_steps=-1", "it must be 0 or more"),
        ("trainer.offload_folder=/tmp", "set that to nvme"),
        ("trainer.muon_iterations=0", "it must be between 1 and 20"),
    ],
)
def test_setting_that_cannot_work_is_refused_in_one_line(override: str, said: str, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        begin(data, tmp_path, override)
    assert said in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()
