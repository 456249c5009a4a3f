"""A real run answers ``/metrics`` while it trains, and a resume may begin to."""

import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem.jobs.start import resume, train
from tandem.metrics_database.promql.syntax import NAME, Matcher
from tandem.metrics_database.store import FILE, MetricsReader
from tandem.runtime.callback import Callback
from tandem.runtime.exposition.names import metric_name
from tandem.runtime.records.metrics import read_rows
from tandem.types import RunError

CREATE = {
    "architecture": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "intermediate_size": 16, "max_position_embeddings": 64,
}  # fmt: skip


class Ask(Callback):
    """Asks the run's only target in ``folder`` after each step, and stops the run after step ``last``."""

    def __init__(self, folder: Path, last: int) -> None:
        self.folder, self.last, self.step = folder, last, -1
        self.said: list[str] = []

    def row(self, row: Mapping[str, Any]) -> None:
        self.step = int(row["step"])
        for file in self.folder.glob("*.json"):
            with urllib.request.urlopen(f"http://{json.loads(file.read_text())[0]['targets'][0]}/metrics", timeout=30) as answer:
                self.said.append(answer.read().decode())

    def wants_stop(self) -> bool:
        return self.step >= self.last


def test_a_run_answers_while_it_trains_and_a_resume_may_begin_to(tmp_path: Path) -> None:
    targets = tmp_path / "targets"
    targets.mkdir()
    recipe = {
        "algorithm": {"name": "sft"}, "model": {"create": CREATE}, "task": {"name": "sort", "min_digits": 2, "max_digits": 3},
        "data": {"sequence_length": 16, "global_batch_size": 2}, "run": {"max_steps": 4, "directory": str(tmp_path), "name": "r"},
        "trainer": {"warmup_steps": 0}, "machine": {"threads": 1},
    }  # fmt: skip
    silent, asked = Ask(targets, 1), Ask(targets, 9)
    with pytest.raises(RunError, match=r"Ask\.wants_stop stopped the run"):
        train(recipe, callbacks=[silent], progress=False)
    assert silent.said == []
    resume(tmp_path / "r", overrides=[f"--metrics.targets_folder={targets}"], callbacks=[asked], progress=False)
    last = read_rows(tmp_path / "r" / "metrics.jsonl")[-1]
    assert (last["step"], len(asked.said)) == (3, 2)
    labels = '{job="sft",run="r"}'
    for line in (f"tandem_step{labels} 3.0", f"tandem_train_loss{labels} {last['train/loss']}", f"tandem_steps_total{labels} 2.0"):
        assert f"\n{line}\n" in asked.said[-1]
    assert '\ntandem_events_total{job="sft",kind="resume",run="r"} 1.0\n' in asked.said[-1]
    assert not list(targets.iterdir()) and not list((tmp_path / "r").glob("*-wal")), "nothing stays behind"
    newest = {dict(series.labels)[NAME]: series.values[-1] for series in MetricsReader(tmp_path / "r" / FILE).read([Matcher("run", "=", "r")], 0, 2**60)}
    numbers = {metric_name(key): float(value) for key, value in last.items() if isinstance(value, int | float)}
    assert len(numbers) > 10 and {name: newest.get(name) for name in numbers} == numbers, "the database beside the journal ends with the last row"
    assert newest["up"] == 1.0 and newest["tandem_steps_total"] == 2.0 and newest["tandem_process_resident_memory_bytes"] > 1e6
