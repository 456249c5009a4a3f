"""Samples that repeat themselves are ended early in a run, counted in its rows, and the same after a kill."""

import json
from pathlib import Path

import pytest
import yaml
from pod_runs import RECIPE, PodRun, difference

from tandem.runtime.records.journal import Journal
from tandem.types import FinishReason

STEPS, COUNT, LONGEST = 3, 4, 2


def recipe(folder: Path) -> Path:
    """Writes the tiny recipe on demonstrations that repeat one or two characters, which the model learns to do."""
    rows = [{"prompt": f"{i + 11}=", "answer": ("7" if i % 2 else "42") * 12} for i in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "other.jsonl").write_text('{"prompt": "99=", "answer": "1"}\n')
    content = yaml.safe_load(RECIPE.read_text())
    content["task"] = {"name": "dataset", "path": f"{folder}/rows.jsonl", "eval_path": f"{folder}/other.jsonl"}
    content["sft"] |= {"steps": 60, "corrupted_share": 0.0}
    content["rollout"] |= {"max_tokens": 24, "repetition_detection": {"min_count": COUNT, "max_pattern_size": LONGEST}}
    content["evaluation"] |= {"prompts": 1, "final_prompts": 1, "consecutive": 100}
    content["run"] |= {"max_steps": STEPS}
    path = folder / "repeating.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def first_repetition(tokens: tuple[int, ...]) -> int | None:
    """Returns the number of tokens after which the last ones are a pattern of at most ``LONGEST`` tokens, ``COUNT`` times in a row."""
    for end in range(1, len(tokens) + 1):
        for size in range(1, LONGEST + 1):
            if end >= size * COUNT and tokens[end - size * COUNT : end] == tokens[end - size : end] * COUNT:
                return end
    return None


@pytest.mark.full
def test_a_model_that_repeats_itself_is_ended_early_counted_and_the_same_after_a_kill(tmp_path: Path) -> None:
    quiet, run = (PodRun(tmp_path / name, recipe=recipe(tmp_path)) for name in ("quiet", "killed"))
    done = quiet.train()
    assert done.returncode == 0, done.stdout + done.stderr
    repeated = 0
    with Journal(quiet.directory / "journal.sqlite", read_only=True) as journal:
        for step, row in enumerate(quiet.rows()):
            samples = journal.samples(step)
            assert samples is not None
            ended = [sample for sample in samples if sample.finish_reason is FinishReason.REPETITION]
            assert row["response_length/repetition_ratio"] == len(ended) / len(samples)
            assert row["mismatch_kl"] == 0.0
            for sample in samples:
                at = first_repetition(sample.token_ids)
                # It ends with the token that completes the pattern, unless that token ends it anyway.
                assert at == (len(sample.token_ids) if sample in ended else None)
            repeated += len(ended)
    assert repeated > STEPS, "hardly a sample repeats itself, so that this test says nothing"
    report = (quiet.directory / "report.html").read_text()
    assert '"finish":"repetition"' in report
    done = run.train("--fault", "rollout_worker:after:rollout:1,pod:after:commit_samples:2")
    assert done.returncode == -9, done.stdout + done.stderr
    done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, quiet) == [] and run.left_behind() == []
