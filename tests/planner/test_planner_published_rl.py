"""Predicted steps of reinforcement learning beside published ones, on which nothing was fitted."""

import sys
from pathlib import Path
from statistics import fmean

import pytest

from tandem.estimate.lengths import Lengths

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import rl_steps_published  # noqa: E402


def test_every_row_has_its_source_and_the_lengths_that_it_publishes() -> None:
    rows = rl_steps_published.rows()
    assert len(rows) == 28
    for each in rows:
        assert each.row["source"] in rl_steps_published.SOURCES
        assert each.step.output_lengths.mean == pytest.approx(float(each.row["response_tokens"]), abs=1)
        most, prompt = float(each.row["max_sequence"]), each.step.prompt_lengths.mean
        assert each.step.output_lengths.quantile(1 - 1e-9) <= most - prompt + 0.01
        # What is trained, computed again from what the planner is given; each figure of the tables is a mean of five steps.
        tokens = each.step.prompts * each.step.group * (prompt + each.step.output_lengths.mean)
        assert tokens / each.seconds / float(each.row["gpus"]) == pytest.approx(float(each.row["tokens_per_s_per_gpu"]), rel=0.16)
        assert 90 < prompt < 150, "problems of one data set in three tokenizers"


def test_lengths_that_are_cut_keep_their_published_mean() -> None:
    cut = rl_steps_published.cut_lengths(3154, 3998)
    assert cut.mean == pytest.approx(3154, abs=0.1)
    assert Lengths.around(3154, most=3998).mean < 3000


def errors(models: set[str]) -> list[float]:
    rows = [each for each in rl_steps_published.rows() if each.row["model"] in models]
    return [each.predicted().seconds / each.seconds - 1 for each in rows]


def test_published_steps_of_dense_models_are_predicted_as_the_document_says() -> None:
    dense = errors({"llama-3.1-8b", "qwen3-32b"})
    assert all(-0.4 < error < 0 for error in dense), "a lower bound"
    assert fmean(map(abs, dense)) == pytest.approx(0.24, abs=0.02)


def test_published_phases_add_up_and_training_is_closer_than_generation() -> None:
    steps = rl_steps_published.with_phases()
    assert len(steps) == 6
    for each in steps:
        phases = [float(each.row[f"{name}_seconds"]) for name in rl_steps_published.PHASES]
        assert 0.9 < sum(phases) / each.seconds < 1.0, "the rest is what a trainer does beside its phases"
        error = {name: rl_steps_published.phase_error(each, name) for name in rl_steps_published.PHASES}
        assert -0.5 < error["training"] < 0 and -0.65 < error["generation"] < -0.35 and error["refit"] < -0.7
        assert abs(error["training"]) < abs(error["generation"])


@pytest.mark.full
def test_published_steps_of_all_models_are_predicted_as_the_document_says() -> None:
    everything = errors({each.row["model"] for each in rl_steps_published.rows()})
    assert all(-0.8 < error < 0 for error in everything)
    assert fmean(map(abs, everything)) == pytest.approx(0.42, abs=0.02)
