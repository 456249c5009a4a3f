"""Runs on data, started by the command, and the rows that they wrote."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tandem.cli.main import main
from tandem.report.run_facts import RESULT_KEY
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.metrics import VOLATILE


def command(*arguments: str, status: int = 0, folder: Path | None = None, limit_s: float = 400) -> str:
    """Runs ``tandem ARGUMENTS`` in ``folder`` and returns its output. It must exit with ``status`` and without a traceback. ``limit_s`` ends a command that
    hangs; it is far above what the command takes on a busy machine."""
    done = subprocess.run([sys.executable, "-m", "tandem.cli.main", *arguments], cwd=folder, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout + done.stderr


def refused(*arguments: str, folder: Path | None = None) -> str:
    """Runs ``tandem ARGUMENTS`` in ``folder`` in this process, which is faster than starting one, and returns the one line of its refusal."""
    said = io.StringIO()
    with contextlib.chdir(folder or os.curdir), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        assert main(list(arguments)) == 2, said.getvalue()
    line = said.getvalue().rstrip("\n")
    assert line.startswith("tandem: ") and "\n" not in line, line
    return line


def write_sections(folder: Path, sections: dict[str, Any], changed: dict[str, Any]) -> Path:
    """Writes the recipe of ``sections``, with the keys that ``changed`` has for some of them, to ``folder``; returns its file."""
    for name, values in changed.items():
        sections[name] = {**sections.get(name, {}), **values}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(sections))
    return folder / "recipe.yaml"


def train_until_killed(recipe: Path, run: Path, row_count: int, *, limit_s: float) -> None:
    """Trains ``recipe`` in a process of its own and kills it where ``run`` has more than ``row_count`` rows, within ``limit_s``."""
    process = subprocess.Popen([sys.executable, "-m", "tandem.cli.main", "train", str(recipe)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    path, ends = run / "metrics.jsonl", time.monotonic() + limit_s
    while not path.exists() or path.read_bytes().count(b"\n") <= row_count:
        assert time.monotonic() < ends and process.poll() is None
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def forget_end(run: Path) -> None:
    """Makes the finished ``run`` one that was killed right before its end was recorded."""
    with Journal(run / "journal.sqlite") as journal:
        journal.set(RESULT_KEY, None)


def rows(run: Path, *, every_key: bool = False) -> list[dict[str, Any]]:
    """Returns the rows of ``metrics.jsonl``; without ``every_key``, only keys that do not depend on time or memory."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if every_key or not key.startswith(VOLATILE)} for row in found]
