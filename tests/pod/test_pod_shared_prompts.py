"""Prompts computed once in a pod's trainer: the same curve, and rollout and trainer agree bit for bit, on any mesh that has whole sequences."""

import json
from pathlib import Path
from typing import Any

import pytest
from pod_runs import RECIPE, PodRun

from tandem.config.recipe import load_config
from tandem.jobs.start import train

COMPARED = ("reward/mean", "actor/pg_loss", "actor/grad_norm", "kl", "actor/entropy")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_pod_with_shared_prompts_agrees_with_its_rollout_and_counts_what_it_saves(tmp_path: Path) -> None:
    rewards = f"--rewards.functions=[{{function: '{Path(__file__).parent}/rewards.py:digits'}}]"
    given = [f"--run.directory={tmp_path}", "--run.name=run", "--run.max_steps=2", "--trainer.share_prompts=true", rewards]
    train(load_config(RECIPE, given), inline=True, progress=False)
    for row in rows_of(tmp_path / "run"):
        assert row["mismatch_kl"] == row["mismatch_max_abs"] == 0.0 and row["actor/grad_norm"] > 0
        assert row["perf/shared_prompt_share"] > 0.1 and 0 < row["perf/padding_share"] < 1


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh",
    [
        (), ("--parallel.data=2",), ("--parallel.tensor=2", "--model.create.num_key_value_heads=2"), ("--parallel.pipeline=2",),
        ("--parallel.data=2", "--parallel.zero=3", "--trainer.recompute=full"),
    ],
    ids=lambda mesh: " ".join(mesh) or "one rank",
)  # fmt: skip
def test_shared_prompts_give_the_curve_of_separate_ones_on_meshes(mesh: tuple[str, ...], tmp_path: Path) -> None:
    shared, separate = PodRun(tmp_path, name="shared"), PodRun(tmp_path, name="separate")
    for run, given in ((shared, "true"), (separate, "false")):
        done = run.train(f"--trainer.share_prompts={given}", "--run.max_steps=2", *mesh)
        assert done.returncode == 0, done.stderr
    for row, other in zip(shared.rows(), separate.rows(), strict=True):
        assert row["mismatch_kl"] == other["mismatch_kl"] == 0.0
        assert [row[name] for name in COMPARED] == pytest.approx([other[name] for name in COMPARED], rel=1e-4, abs=1e-6)
