"""A real run of GRPO, its memory beside the prediction, and what ``tandem plan --measured`` says of it beside what its own records have."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tandem.config.recipe import Recipe, load_config
from tandem.layout.parameters import parameter_count
from tandem.planner.model_input import recipe_shapes
from tandem.runtime.machine.heap import KEPT_BYTES
from tandem.runtime.records.journal import Journal
from tandem.types import Sample

STEPS, PROMPTS, GROUP = 3, 8, 8
RECIPE = """
model: {create: {architecture: qwen3, hidden_size: 256, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 64,
  intermediate_size: 768}}
task: {name: sort}
sft: {steps: 30}
evaluation: {every_steps: 100, prompts: 8, final_prompts: 8}
rollout: {prompts_per_step: 8, max_tokens: 24, engine: {speculative_config: {method: ngram, num_speculative_tokens: 3, disable_by_batch_size: 256,
  adaptive: false}}}
algorithm: {group_size: 8, kl_coef: 0.0}
trainer: {share_prompts: true, micro_batch_tokens: 8192}
checkpoint: {every_steps: 100}
residents: {plan: keep}
"""


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tandem.cli.main", *words], capture_output=True, text=True, timeout=550)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, beside its recipe ``recipe.yaml``."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "recipe.yaml").write_text(f"{RECIPE}run: {{max_steps: {STEPS}, name: run, directory: {folder}}}\n")
    done = command("train", str(folder / "recipe.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def samples_of(run: Path) -> list[list[Sample]]:
    """Returns the samples of every step."""
    with Journal(run / "journal.sqlite", read_only=True) as journal:
        return [journal.samples(step) or [] for step in range(STEPS)]


def plan(run: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return command("plan", str(run.parent / "recipe.yaml"), "--gpus", "2", "--dp", "2", "--gpu", "H100-80GB", "--measured", *words)


def beginnings(sequences: list[tuple[int, ...]]) -> int:
    """Returns the number of distinct beginnings of ``sequences``."""
    return len({tokens[:end] for tokens in sequences for end in range(1, len(tokens) + 1)})


@pytest.mark.full
def test_lengths_common_beginnings_and_acceptance_of_a_plan_are_those_of_the_records_of_a_real_run(run: Path) -> None:
    done = plan(run, str(run), "--json")
    assert done.returncode == 0, done.stderr
    step, rows, every = json.loads(done.stdout)["rl_step"], rows_of(run), samples_of(run)
    assert [len(samples) for samples in every] == [PROMPTS * GROUP] * STEPS
    completions = fmean(len(sample.token_ids) for samples in every for sample in samples)
    first = fmean(len(sample.prompt_token_ids) for sample in every[0])
    text = plan(run, str(run)).stdout
    assert f"prompts of {first:,.0f} tokens on average, completions of {completions:,.0f} tokens on average" in text
    assert step["response_tokens"]["mean"] == pytest.approx(completions, abs=0.75) and step["prompt_tokens"] == pytest.approx(first, abs=0.75)
    # What is read of a sample that is trained on; of completions of a group, what an earlier one begins with too.
    assert all(row["perf/micro_batches"] == 1 for row in rows)
    repeated = read = 0
    for row, samples in zip(rows, every, strict=True):
        trained = [(*sample.prompt_token_ids, *sample.token_ids[:-1]) for sample in samples]
        assert row["perf/shared_prompt_share"] == pytest.approx(1 - beginnings(trained) / sum(map(len, trained)), abs=1e-6)
        for prompt in {sample.prompt_id for sample in samples}:
            own = [sample.token_ids[:-1] for sample in samples if sample.prompt_id == prompt]
            read += sum(map(len, own))
            repeated += sum(map(len, own)) - beginnings(own)
    assert repeated / read > 0.02 and step["measured"]["begun"] == pytest.approx(repeated / read, abs=0.05)
    # An acceptance a of k tokens draws a + a^2 + ... + a^k beside the model's own.
    drawn = [(row["perf/spec_accept_length"] - 1, row["perf/spec_accept_rate"]) for row in rows if "perf/spec_accept_length" in row]
    accepted, rate = (fmean(each) for each in zip(*drawn, strict=True))
    rate_of_one, proposed = step["measured"]["draft_acceptance"], accepted / rate
    assert 0 < rate_of_one < 1 and 1 <= proposed <= 3
    powers = [sum(rate_of_one**place for place in range(1, count + 1)) for count in (int(proposed), int(proposed) + 1)]
    assert accepted == pytest.approx(powers[0] + (proposed % 1) * (powers[1] - powers[0]), rel=1e-6)
    assert step["speculation"]["acceptance"] == rate_of_one


@pytest.mark.full
def test_a_folder_that_is_no_run_and_a_run_without_a_step_are_refused_in_one_line(run: Path, tmp_path: Path) -> None:
    begun, empty = tmp_path / "begun", tmp_path / "empty"
    shutil.copytree(run, begun)
    (begun / "metrics.jsonl").unlink()
    shutil.copytree(begun, empty)
    (empty / "metrics.jsonl").touch()
    no_run, no_step = "is no folder of a run", "has measured no step of reinforcement learning"
    for folder, said in ((tmp_path, no_run), (tmp_path / "none", no_run), (run / "config.yaml", no_run), (begun, no_step), (empty, no_step)):
        done = plan(run, str(folder))
        assert done.returncode != 0 and not done.stdout
        [line] = done.stderr.splitlines()
        assert f"--measured is '{folder}', which {said}; name the folder of a run of reinforcement learning that has taken a step" in line


@pytest.mark.full
def test_between_updates_a_trainer_holds_what_is_predicted_with_the_heap_that_it_keeps(run: Path) -> None:
    first, *_, last = rows_of(run)
    recipe = load_config(run / "config.yaml")
    assert isinstance(recipe, Recipe)
    measured, predicted = last["memory/wait_rollout/measured"], last["memory/wait_rollout/predicted"]
    assert predicted / 1.25 < measured < 1.25 * predicted
    assert last["memory/train/measured"] < 1.25 * last["memory/train/predicted"]
    # Before the first update there are neither moments nor what an update has freed, which is kept: all beyond the moments.
    moments = 2 * 4 * parameter_count(recipe_shapes(recipe.model))
    grown = measured - first["memory/wait_rollout/measured"]
    assert moments + (16 << 20) < grown < 1.25 * (moments + KEPT_BYTES), (moments, grown)
