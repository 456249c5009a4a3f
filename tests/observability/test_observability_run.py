"""A real run answers ``/metrics`` while it trains, and a resume may begin to."""

import contextlib
import json
import os
import signal
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


class Kill(Callback):
    """Kills what runs beside the run after its second step, and keeps what the run says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def row(self, row: Mapping[str, Any]) -> None:
        if row["step"] == 1:
            for name in (b"tandem.metrics_database.collect", b"tandem.trackers.follow"):
                (process,) = [each for each in Path("/proc").glob("[0-9]*") if name in _command(each) and str(os.getpid()).encode() in _command(each)]
                os.kill(int(process.name), signal.SIGKILL)

    def message(self, text: str) -> None:
        self.said.append(text)


def _command(process: Path) -> list[bytes]:
    with contextlib.suppress(OSError):
        return (process / "cmdline").read_bytes().split(b"\0")
    return []


@pytest.mark.full
def test_what_is_killed_beside_a_run_is_started_again_and_lacks_nothing_of_its_end(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed, so no tracker is killed")
    recipe = {
        "algorithm": {"name": "sft"}, "model": {"create": CREATE}, "task": {"name": "sort", "min_digits": 2, "max_digits": 3},
        "data": {"sequence_length": 16, "global_batch_size": 2}, "run": {"max_steps": 4, "directory": str(tmp_path), "name": "r"},
        "trainer": {"warmup_steps": 0}, "machine": {"threads": 1}, "metrics": {"targets_folder": ""}, "trackers": {"names": ["tensorboard"]},
    }  # fmt: skip
    kill = Kill()
    train(recipe, callbacks=[kill], progress=False)
    again = [line for line in kill.said if "has ended (killed by SIGKILL) and is started again; the run does not wait for it" in line]
    assert sorted(line.partition(" has")[0] for line in again) == ["the metrics database", "tracker tensorboard"], kill.said
    assert len((tmp_path / "r" / "trackers" / "tensorboard.sent").read_text().splitlines()) == 4 and not [line for line in kill.said if "lacks" in line]
    newest = {dict(series.labels)[NAME]: series.values[-1] for series in MetricsReader(tmp_path / "r" / FILE).read([Matcher("run", "=", "r")], 0, 2**60)}
    assert newest["tandem_step"] == 3.0 and newest["up"] == 1.0
