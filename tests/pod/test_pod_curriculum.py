"""Sampling in proportion to failures in a pod: each draw follows from the journal, and survives kill -9 and a replay."""

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml
from pod_runs import RECIPE, PodRun, difference

from tandem.config.recipe import load_config
from tandem.data.order import weighted_indices
from tandem.jobs.prepare import read_recipe
from tandem.jobs.replay.replay_rl import replay_rl_step
from tandem.jobs.start import train
from tandem.runtime.callback import Callback
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.metrics import read_rows

LONG = '''
def is_long(completions, **_):
    """Returns 1 for completions of more than two characters."""
    return [float(len(text) > 2) for text in completions]
'''


def recipe(folder: Path) -> Path:
    """Writes the tiny recipe on a file of 20 prompts, drawn in proportion to their failures."""
    (folder / "long.py").write_text(LONG)
    rows = [{"prompt": f"{i * 7 % 20 + 11}=", "answer": "1"} for i in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "other.jsonl").write_text('{"prompt": "99=", "answer": "1"}\n{"prompt": "98=", "answer": "1"}\n{"prompt": "97=", "answer": "1"}\n')
    content = yaml.safe_load(RECIPE.read_text())
    content["task"] = {"name": "dataset", "path": str(folder / "rows.jsonl"), "eval_path": str(folder / "other.jsonl")}
    content["rewards"] = {"functions": [{"function": f"{folder}/long.py:is_long"}]}
    content["rollout"] |= {"prompt_order": {"by": "success_rate", "solved_weight": 0.2}}
    content["sft"]["corrupted_share"] = 0.0
    content["evaluation"]["consecutive"] = 100
    path = folder / "curriculum.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def check_draws(directory: Path, steps: int) -> set[float]:
    """Asserts that each step's prompts, and the metrics of its row, follow from the correct completions so far; returns the success rates that occurred."""
    judged, right = Counter[int](), Counter[int]()
    rows = read_rows(directory / "metrics.jsonl")
    with Journal(directory / "journal.sqlite", read_only=True) as journal:
        for step in range(steps):
            weights = [max(1 - right[i] / judged[i], 0.2) if judged[i] else 1.0 for i in range(20)]
            samples, scores = journal.samples(step), journal.scores(step)
            assert samples is not None and scores is not None
            drawn = [int(sample.prompt_id.removeprefix("train-")) for sample in samples]
            assert drawn[::4] == weighted_indices(step, 4, 0, weights)
            for index, score in zip(drawn, scores, strict=True):
                judged[index] += 1
                right[index] += bool(score.value)
            rates = [right[i] / judged[i] for i in judged]
            assert rows[step]["curriculum/success_rate"] == pytest.approx(sum(rates) / len(rates), abs=1e-12)
            assert rows[step]["curriculum/seen_share"] == len(rates) / 20 and rows[step]["curriculum/solved_share"] == rates.count(1.0) / 20
    return {right[i] / judged[i] for i in judged}


@pytest.mark.full
def test_prompts_are_drawn_in_proportion_to_failures_and_replayed(tmp_path: Path) -> None:
    train(load_config(recipe(tmp_path), [f"--run.directory={tmp_path}", "--run.name=run", "--run.max_steps=4"]), inline=True, progress=False)
    assert len(check_draws(tmp_path / "run", 4)) > 1, "all prompts have the same success rate, so that this test says nothing"
    run = tmp_path / "run"
    page = (run / "report.html").read_text()
    assert "mean success rate" in page and "always solved" in page
    compared = replay_rl_step(read_recipe(run), run, 3, ("rollout", "rewards"), inline=True, callback=Callback(), say=lambda line: None)
    assert [(part.part, part.count, part.differences) for part in compared] == [("rollout", 16, ()), ("rewards", 16, ())]


@pytest.mark.full
def test_curriculum_survives_kills_bit_for_bit(tmp_path: Path) -> None:
    quiet, run = PodRun(tmp_path / "quiet", recipe=tmp_path / "curriculum.yaml"), PodRun(tmp_path / "run", recipe=recipe(tmp_path))
    assert quiet.train().returncode == 0
    done = run.train("--fault", "trainer_worker:after:train:2,pod:after:commit_samples:4")
    assert done.returncode == -9, done.stdout + done.stderr
    done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, quiet) == [] and run.left_behind() == []
    check_draws(run.directory, 6)
