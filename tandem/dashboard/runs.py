"""The runs in a folder: found, listed, and opened once."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.dashboard.open_run import JOURNAL, METRICS, OpenRun, Stamp, stamp_of
from tandem.report.run_facts import RESULT_KEY
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.run_lock import lock_holder
from tandem.types import RunError, UserError

DEPTH = 4
MOST_FOLDERS = 10_000
"""Folders that are looked into for runs, so that a wrong folder costs no minutes."""
MOST_RUNS = 1000
MOST_OPEN = 16
"""Runs whose metrics are kept in memory."""
_TAIL_BYTES = 65_536
_SHOWN = ("reward/mean", "accuracy", "train/loss", "timing_s/step", "perf/tokens_per_s")


@dataclass
class _Listed:
    stamp: Stamp
    entry: dict[str, Any]


class Runs:
    """The runs in ``folder``, or the run that it is itself. Raises ``UserError`` where it is not a folder."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(f"'{folder}' is not a folder; name the folder with your runs, or a run")
        self.folder = folder
        self._lock = threading.Lock()
        self._open: dict[str, OpenRun] = {}
        self._listed: dict[str, _Listed] = {}

    def find(self) -> dict[str, Path]:
        """Returns the folders of the runs by name: the path below the folder, or the folder's own name where it is a run."""
        if _is_run(self.folder):
            name = self.folder.resolve().name
            return {name: self.folder, **{f"{name}/{stage}": path for stage, path in stages(self.folder).items()}}
        found: dict[str, Path] = {}
        self._search(self.folder, "", DEPTH, found, iter(range(MOST_FOLDERS)))
        return dict(sorted(found.items()))

    def _search(self, folder: Path, prefix: str, depth: int, found: dict[str, Path], left: Iterator[int]) -> None:
        if next(left, None) is None:
            return
        try:
            inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        except OSError:
            return
        for path in inner:
            if len(found) >= MOST_RUNS:
                return
            if _is_run(path):
                found[prefix + path.name] = path
                found.update({f"{prefix}{path.name}/{stage}": inside for stage, inside in stages(path).items()})
            elif depth > 1:
                self._search(path, f"{prefix}{path.name}/", depth - 1, found, left)

    def open(self, name: str) -> OpenRun:
        """Returns the run ``name``. Raises ``UserError`` where there is none."""
        with self._lock:
            run = self._open.pop(name, None)
            if run is None or not _is_run(run.directory):
                directory = self.find().get(name)
                if directory is None:
                    raise UserError(f"there is no run '{name[:200]}' in {self.folder}; it may have been moved or removed")
                run = OpenRun(name, directory)
            self._open[name] = run
            while len(self._open) > MOST_OPEN:
                del self._open[next(iter(self._open))]
            return run

    def stamps(self) -> list[tuple[str, Stamp]]:
        """Returns the stamp of each run, which changes when it writes something."""
        return [(name, stamp_of(path)) for name, path in self.find().items()]

    def list(self) -> list[dict[str, Any]]:
        """Returns what the list says of each run; what has not changed is not read again."""
        listed: dict[str, _Listed] = {}
        for name, path in self.find().items():
            stamp, known = stamp_of(path), self._listed.get(name)
            listed[name] = known if known is not None and known.stamp == stamp else _Listed(stamp, listed_run(name, path))
        self._listed = listed
        return [each.entry for each in listed.values()]


def _is_run(folder: Path) -> bool:
    return (folder / JOURNAL).is_file() or (folder / METRICS).is_file()


def stages(run: Path) -> dict[str, Path]:
    """Returns the stage before reinforcement learning, which is a run of its own in the folder of the run."""
    return {"sft": run / "sft"} if _is_run(run / "sft") else {}


def listed_run(name: str, path: Path) -> dict[str, Any]:
    """Returns what the list says of the run in ``path``."""
    stamp = stamp_of(path)
    last = last_row(path / METRICS)
    entry: dict[str, Any] = {
        "name": name, "live": lock_holder(path) is not None, "steps": None if last is None else last["step"] + 1, "state": "", "problem": "",
        "changed_s": max((part[2] / 1e9 for part in stamp[:3] if part), default=0.0), "figures": {key: last[key] for key in _SHOWN if last and key in last},
    }  # fmt: skip
    if not (path / JOURNAL).is_file():
        entry["problem"] = "it has no journal.sqlite"
        return entry
    try:
        with Journal(path / JOURNAL, read_only=True, brief=True, busy_s=1.0) as journal:
            result = journal.get(RESULT_KEY) or {}
    except RunError as error:
        entry["problem"] = str(error)
        return entry
    ended = bool(result) and last is not None and result.get("steps") == last["step"] + 1
    reached = result.get("reached") if ended else None
    entry["state"] = "not finished" if not ended else "finished" if reached is None else "target reached" if reached else "target not reached"
    return entry


def last_row(path: Path) -> dict[str, Any] | None:
    """Returns the newest whole row of ``metrics.jsonl`` that can be read, from the end of the file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            data = file.read(_TAIL_BYTES)
    except OSError:
        return None
    for line in reversed(data[: data.rfind(b"\n") + 1].split(b"\n")):
        try:
            row = json.loads(line) if line else None
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            return row
    return None
