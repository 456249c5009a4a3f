"""A run on data with two ranks, started by the command, that goes on until it is ended; and a rank of it that is slowed down."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pretrain_recipe import write_recipe
from prometheus_client.parser import text_string_to_metric_families

from tandem.runtime.process.heartbeat_table import newest_ranks
from tandem.runtime.records.journal import Event, Journal

_LIMIT_S = 240.0


class WatchedRun:
    """Two ranks in ``folder``/r/run that train on the datasets in ``data``, with ``sections`` of the recipe over a small one."""

    def __init__(self, folder: Path, data: Path, **sections: Any) -> None:
        self.directory = folder / "r" / "run"
        made = {
            "create": {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 256}, "evaluation": {"every_steps": 100_000},
            "data": {"train": [{"path": str(data / "json")}], "global_batch_size": 32}, "trainer": {"micro_batch_tokens": 400},
            "checkpoint": {"every_steps": 100_000}, "run": {"max_steps": 100_000}, "parallel": {"data": 2}, "metrics": {"port": 0}, **sections,
        }  # fmt: skip
        write_recipe(folder / "r", data, **made)
        self.output = folder / "output"
        with self.output.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tandem.cli.main", "train", "recipe.yaml", "--machine.threads=1"], cwd=folder / "r", stdout=sink, stderr=sink
            )

    def events(self, *kinds: str) -> list[Event]:
        path = self.directory / "journal.sqlite"
        if not path.exists():
            return []
        with Journal(path, read_only=True) as journal:
            return [event for event in journal.events() if event.kind in kinds]

    def wait_for(self, *kinds: str) -> Event:
        """Waits for the first event of one of ``kinds``."""
        ends = time.monotonic() + _LIMIT_S
        while not (found := self.events(*kinds)):
            assert time.monotonic() < ends and self.process.poll() is None, self.output.read_text()[-3000:]
            time.sleep(0.2)
        return found[0]

    @property
    def rows(self) -> int:
        path = self.directory / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for_step(self, step: int) -> None:
        ends = time.monotonic() + _LIMIT_S
        while self.rows < step:
            assert time.monotonic() < ends and self.process.poll() is None, self.output.read_text()[-3000:]
            time.sleep(0.1)

    def rank_pid(self, rank: int) -> int:
        return next(state.pid for state in newest_ranks(self.directory) if state.rank == rank)

    def metric(self, name: str, **labels: str) -> float | None:
        """Returns the value of the series ``name`` with ``labels`` that ``/metrics`` has now, ``None`` if it has none."""
        match = re.search(r"metrics at (http://\S+)", self.output.read_text())
        assert match is not None
        with urllib.request.urlopen(match[1], timeout=30) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        samples = [sample for family in families for sample in family.samples if sample.name == name and labels.items() <= sample.labels.items()]
        return samples[0].value if samples else None

    def wait_for_metric(self, value: float, name: str, **labels: str) -> None:
        ends = time.monotonic() + 60
        while (found := self.metric(name, **labels)) != value:
            assert time.monotonic() < ends, (name, labels, found)
            time.sleep(0.2)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextmanager
def throttled(pid: int, period_s: float = 0.04, share: float = 0.75) -> Iterator[None]:
    """Inside, the process ``pid`` is stopped for ``share`` of the time, as ``cpulimit`` does it."""
    ended = threading.Event()

    def throttle() -> None:
        while not ended.wait(period_s * (1 - share)):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(period_s * share)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=throttle, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        os.kill(pid, signal.SIGCONT)
