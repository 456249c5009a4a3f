"""The command in a folder of its own, and the runs that it launches."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TINY = Path(__file__).parent / "tiny.yaml"
COMMAND = Path(sys.executable).with_name("tandem")
REWARDS = Path(__file__).parents[1] / "pod" / "rewards.py"


@dataclass
class LaunchedRuns:
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shutil.copy(REWARDS, self.folder)

    def begin(self, *arguments: str | Path) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [str(COMMAND), *map(str, arguments)], cwd=self.folder, env={**os.environ, **self.environment, "COLUMNS": "200"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def tandem(self, *arguments: str | Path) -> str:
        """Returns what a command prints that succeeds."""
        process = self.begin(*arguments)
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, (arguments, out, error)
        return out

    def refusal(self, *arguments: str | Path) -> str:
        """Returns the one line of a command that is refused."""
        process = self.begin(*arguments)
        out, error = process.communicate(timeout=300)
        assert process.returncode == 2 and out == "" and error.count("\n") == 1, (arguments, out, error)
        return error.strip().removeprefix("tandem: ")

    def directory(self, name: str) -> Path:
        return self.folder / "runs" / name

    def output(self, name: str) -> str:
        """Returns what the run's jobs have written."""
        return "".join(path.read_text() for path in sorted((self.directory(name) / "logs").glob("*-*.out")))

    def status(self, name: str) -> dict[str, Any]:
        return dict(json.loads(self.tandem("status", f"runs/{name}", "--json")))

    def wait_for_state(self, name: str, *states: str) -> dict[str, Any]:
        """Waits until the run is in one of ``states``."""
        ends = time.monotonic() + 240
        while (status := self.status(name))["state"] not in states:
            assert time.monotonic() < ends, (status, self.output(name))
            time.sleep(0.3)
        return status

    def wait_for_step(self, name: str, step: int) -> None:
        """Waits until the run has taken ``step`` steps."""
        path, ends = self.directory(name) / "metrics.jsonl", time.monotonic() + 240
        while not path.exists() or path.read_bytes().count(b"\n") < step:
            assert time.monotonic() < ends, self.output(name)
            time.sleep(0.02)

    def wait_for_output(self, name: str, pattern: str) -> None:
        """Waits until the run's jobs have written what matches ``pattern``."""
        ends = time.monotonic() + 240
        while not re.search(pattern, self.output(name)):
            assert time.monotonic() < ends, self.output(name)
            time.sleep(0.2)

    def model(self, name: str) -> dict[str, bytes]:
        """Returns the files of the trained model."""
        return {path.name: path.read_bytes() for path in (self.directory(name) / "model").iterdir()}

    def rows(self, name: str) -> list[int]:
        return [json.loads(line)["step"] for line in (self.directory(name) / "metrics.jsonl").read_text().splitlines()]


def left_behind(folder: Path, program: str = "") -> list[str]:
    """Returns what still has the folder of a test in its command line or its environment, and ``program`` in its command line, after it had time to end."""
    until = time.monotonic() + 40
    while (left := [line for line in _processes(str(folder)) if program in line]) and time.monotonic() < until:
        time.sleep(0.2)
    return left


def _processes(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) != os.getpid() and any(text.encode() in (entry / name).read_bytes() for name in ("cmdline", "environ")):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found
