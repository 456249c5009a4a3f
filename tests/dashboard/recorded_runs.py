"""Runs on the disk, written by the real writers of a run's records."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tandem.config.recipe import load_config
from tandem.jobs.run_files import write_recipe
from tandem.runtime.records.entropies import EntropyFile
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.metrics import MetricsFile
from tandem.types import FinishReason, Sample, Score, ScoreState, WeightVersion
from tandem.types.token_entropies import encode_entropies, pack_halves

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "</script><img src=x onerror='window.hacked=1'><b id=title>bold</b> مرحبا 👩‍👩‍👧‍👦 \u202egnp\u202c \x1b[31m\ud83d &amp;"
KEYS = (
    "reward/mean", "reward/std", "reward/correct", "accuracy", "actor/entropy", "actor/grad_norm", "timing_s/rollout", "timing_s/train", "perf/tokens_per_s",
)  # fmt: skip


def value(key: str, step: int) -> float:
    return len(key) + math.sin(step / 30 + len(key))


def row(step: int, **more: Any) -> dict[str, Any]:
    memory = {"memory/train/measured": 3e6 + step, "memory/train/predicted": 4e6}
    return {"step": step, "mismatch_kl": 0.0, "timing_s/step": 2.0, **{key: value(key, step) for key in KEYS}, **memory, **more}


def write_rows(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    metrics = MetricsFile(folder / "metrics.jsonl")
    for each in rows:
        metrics.append(each)
    metrics.close()


def samples_of(step: int, prompts: int = 3, text: str = "") -> tuple[list[Sample], list[Score]]:
    """Returns four samples of each prompt, of which the first is right, and their scores. Prompt ``p0`` is the same in every step."""
    samples, scores = [], []
    for prompt in range(prompts):
        ids = (5, 6, 7) if prompt == 0 else (5, 6, 8 + step % 20, 40 + prompt)
        for index in range(4):
            version = (WeightVersion(1, step),) * 3
            told = text or f"answer {index} of step {step}"
            end = FinishReason.LENGTH if index == 3 else FinishReason.STOP
            name = f"{step}/p{prompt}/{index}"
            samples.append(Sample(name, f"p{prompt}", index, ids, (9, 10, 2), (-0.1, -1.5, -0.01), (-0.1, -1.2, -0.01), version, end, told))
            scores.append(Score(name, ScoreState.NUMBER, float(index == 0), {"correct": float(index == 0), "format": 0.5}, correct=index == 0))
    return samples, scores


def write_step(journal: Journal, step: int, text: str = "") -> None:
    """Journals a step: its phases, its samples and their scores."""
    samples, scores = samples_of(step, text=text)
    with journal.transition(step, "rollout", "rollout"):
        journal.commit_samples(step, samples)
    journal.commit_scores(step, scores)
    with journal.transition(step, "trainer", "train") as detail:
        detail["micro_batches"] = 2


def make_run(folder: Path, rows: Iterable[dict[str, Any]], *, steps: int = 4, text: str = "", finished: bool = False) -> Path:
    """Writes the files of a run of the sort recipe, whose first ``steps`` have samples."""
    folder.mkdir(parents=True)
    write_recipe(load_config(ROOT / "recipes" / "sort.yaml", ["--trainer.learning_rate=0.001"]), folder)
    kept = list(rows)
    write_rows(folder, kept)
    with Journal(folder / "journal.sqlite") as journal:
        journal.next_incarnation()
        journal.set("numerics", {"threads": 2, "torch": "2.13"})
        journal.set("memory", {"trainer": 4e6})
        for step in range(steps):
            write_step(journal, step, text)
        for step in (0, len(kept)):
            example = {"prompt": text or "3 1 2", "completion": text or "1 2 3", "correct": True}
            journal.commit_evaluation(step, "sampled", {"accuracy": 0.25 + step / 1000, "standard_error": 0.01, "count": 4, "examples": [example]})
        # As of a version that did not record them, the first step has none.
        entropies = EntropyFile(folder, print)
        for step in range(1, steps):
            entropies.write(step, encode_entropies({sample.id: pack_halves([0.0625, 1.5, math.nan]) for sample in samples_of(step)[0]}))
        entropies.close()
        journal.record_event("recovery", {"step": 2, "role": "trainer", "reason": text or "rank 1 was killed"})
        if finished:
            journal.set("result", {"steps": len(kept), "reached": True})
    (folder / "logs").mkdir()
    (folder / "logs" / "trainer.log").write_text(f"first line\n{text or 'second line'}\nlast line\n", encoding="utf-8", errors="replace")
    return folder
