"""The machine in words, the driven sides of a benchmark, and where reports go."""

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tandem.runtime.machine.numerics import instruction_set
from tandem.runtime.process.processes import Threads

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def machine() -> str:
    """The processor, its cores and vector extensions, memory and torch, in one line."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.exists() else []:
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{model}, {os.cpu_count()} cores ({instruction_set()}), {memory:.0f} GiB, torch {torch.__version__}, "
        f"Python {platform.python_version()}. Load average when it began: {os.getloadavg()[0]:.1f}."
    )


def write_report(name: str, text: str, folder: Path) -> Path:
    """``text`` as ``NAME-DATE.md`` in ``folder``, and the load when it ended."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{datetime.datetime.now(datetime.UTC).date().isoformat()}.md"
    path.write_text(f"{text.rstrip()}\n\nLoad average when it ended: {os.getloadavg()[0]:.1f}.\n", encoding="utf-8")
    return path


def write_ratios(name: str, rows: Sequence[dict[str, Any]], work: Path) -> None:
    """What ``run_all.py`` gathers: one row a promise, with ``what``, ``ratio`` and ``target``."""
    (work / f"{name}.ratios.json").write_text(json.dumps(list(rows)), encoding="utf-8")


def best_and_median(values: Sequence[float]) -> tuple[float, float]:
    return min(values), statistics.median(values)


def peer_python(given: str, option: str = "--peer-python", how: str = "`make bench`") -> str:
    """The peer's interpreter. Exits where there is none."""
    if not Path(given).is_file():
        sys.exit(f"no peer at '{given}'; {how} makes it, or name its interpreter with {option}")
    return given


class SideFailed(SystemExit):
    """A side ended. Nobody's catching it ends the benchmark with its message."""


class Driven:
    """One side of a benchmark in a process of its own that waits for commands. ``threads`` and the variables of the OpenMP
    runtime are the same on every side; ``extra`` are variables of this side alone. ``start_s``: wall seconds until it was
    ready; ``ready``: what it then said."""

    def __init__(
        self, name: str, command: Sequence[str | Path], threads: int, log: Path, extra: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.log_path = name, log
        environment = {**os.environ, **Threads(threads).environment(), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
        environment |= extra or {}
        began = time.perf_counter()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, env=environment, text=True
            )
        self.ready = self._read()
        self.start_s = time.perf_counter() - began

    def ask(self, command: str) -> dict[str, Any]:
        """The answer to one line."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self._fail()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self._fail()
        found: dict[str, Any] = json.loads(line)
        return found

    def _fail(self) -> None:
        tail = "\n".join(self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
        raise SideFailed(f"the side '{self.name}' ended with status {self.process.wait()}:\n{tail}")

    def close(self) -> None:
        if self.process.poll() is None:
            try:
                self.process.communicate("quit\n", timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def __enter__(self) -> "Driven":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
