"""Runs of the tiny recipe, started by the command in processes of their own, and what they leave behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tandem.runtime.records.journal import Event, Journal, Transition
from tandem.runtime.records.metrics import VOLATILE

HERE = Path(__file__).parent
RECIPE = HERE / "tiny.yaml"
SHARED_MEMORY = Path("/dev/shm")
MARK = "TANDEM_POD_TEST"


@dataclass
class PodRun:
    """A run directory under ``parent`` and its processes, each with one of ``marks`` in its environment, and with ``environment``. ``program``:
    Python's arguments that run the command ``tandem``. ``inside``: returns the command that runs another one on the run's machine."""

    parent: Path
    recipe: Path = RECIPE
    name: str = "run"
    program: tuple[str, ...] = ("-m", "tandem.cli.main")
    marks: list[str] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=dict)
    inside: Callable[..., Sequence[str]] = lambda *command: command

    @property
    def directory(self) -> Path:
        return self.parent / self.name

    def train(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return _finish(self.begin("train", str(self.recipe), f"--run.directory={self.parent}", f"--run.name={self.name}", *arguments))

    def resume(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return _finish(self.begin("resume", str(self.directory), *arguments))

    def begin(self, *arguments: str) -> "subprocess.Popen[str]":
        """Starts ``tandem ARGUMENTS`` as the leader of a process group, as a shell does."""
        self.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / "rewards.py", self.parent)
        self.marks.append(uuid.uuid4().hex)
        return subprocess.Popen(
            self.inside(sys.executable, *self.program, *arguments),
            cwd=self.parent,
            env={**os.environ, **self.environment, MARK: self.marks[-1]},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    # -- what the run produced -------------------------------------------------------------------------------------

    def results(self) -> dict[str, bytes]:
        """Returns every file whose bytes a fault must not change: the model, a critic, a draft head and all checkpoints."""
        exported = [folder for name in ("model", "critic", "draft") if (folder := self.directory / name).is_dir()]
        found = {f"{folder.name}/{path.name}": path.read_bytes() for folder in exported for path in folder.iterdir()}
        for folder in (self.directory / "checkpoints").glob("step-*"):
            found.update({f"{folder.name}/{path.name}": path.read_bytes() for path in folder.iterdir()})
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows of ``metrics.jsonl`` without the keys that depend on time or memory."""
        rows = [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in row.items() if not key.startswith(VOLATILE)} for row in rows]

    def evaluations(self) -> list[tuple[int, str, dict[str, Any]]]:
        with Journal(self.directory / "journal.sqlite", read_only=True) as journal:
            return journal.evaluations()

    def events(self, kind: str) -> list[Event]:
        with Journal(self.directory / "journal.sqlite", read_only=True) as journal:
            return [event for event in journal.events() if event.kind == kind]

    def loaded(self) -> list[dict[str, Any]]:
        """Returns what the journal has of each checkpoint that was loaded."""
        return [event.detail for event in self.events("checkpoint_loaded")]

    def transitions(self) -> list[Transition]:
        with Journal(self.directory / "journal.sqlite", read_only=True) as journal:
            return journal.transitions()

    # -- what it left behind ---------------------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """Returns the command lines, by process id, of living processes that descend from this run's commands, whatever their parent is now."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                environment = (entry / "environ").read_bytes()
                if any(f"{MARK}={mark}".encode() in environment for mark in self.marks):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, ValueError):
                continue
        return found

    def segments(self) -> list[str]:
        """Returns the files in the folder of shared memory that are named after this run's pods: none, as they have no names."""
        log = self.directory / "logs" / "trainer_shim.log"
        pods = set(re.findall(r"weight buffers tandem-([\w.]+)-\d+-", log.read_text() if log.exists() else ""))
        return sorted(path.name for path in SHARED_MEMORY.iterdir() if any(pod in path.name for pod in pods))

    def left_behind(self, patience_s: float = 10.0) -> list[str]:
        """Returns processes and segments that still exist after the kernel had time to deliver its signals."""
        ends = time.monotonic() + patience_s
        while (left := [*self.processes().values(), *self.segments()]) and time.monotonic() < ends:
            time.sleep(0.05)
        return left


def _finish(process: "subprocess.Popen[str]", limit_s: float = 300.0) -> "subprocess.CompletedProcess[str]":
    try:
        out, error = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def finish(process: "subprocess.Popen[str]") -> "subprocess.CompletedProcess[str]":
    """Waits for a process of ``PodRun.begin``."""
    return _finish(process)


def recipe_with(folder: Path, **sections: Any) -> Path:
    """Writes the tiny recipe with whole sections replaced to ``folder`` and returns its path."""
    content = yaml.safe_load(RECIPE.read_text())
    content.update(sections)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def trained(folder: Path, *settings: str) -> PodRun:
    """Returns a run with ``settings`` in ``folder`` that has ended well."""
    run = PodRun(folder)
    done = run.train(*settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def difference(found: PodRun, expected: PodRun) -> list[str]:
    """Returns the names of the results in which ``found`` and ``expected`` are not equal bit for bit."""
    theirs, ours = expected.results(), found.results()
    wrong = [name for name in sorted(theirs.keys() | ours.keys()) if theirs.get(name) != ours.get(name)]
    if found.rows() != expected.rows():
        wrong.append("metrics.jsonl")
    if found.evaluations() != expected.evaluations():
        wrong.append("evaluations")
    return wrong


def train_two_pods(run: PodRun, *settings: str) -> None:
    """Trains ``run`` with a second pod, which leaves nothing behind."""
    done = run.train("--pods", "2", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.left_behind() == []
