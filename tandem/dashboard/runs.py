"""The runs in a folder: found, listed, and opened once."""

import contextlib
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
MOST_FOLDERS = 100_000
"""Folders that are looked at for runs, so that a wrong folder costs no minutes."""
MOST_RUNS = 1000
"""Runs that are listed, those that were changed last; any other can be opened by its name."""
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
        listed: dict[str, Path] = {}
        self._search(self.folder, "", DEPTH, listed, iter(range(MOST_FOLDERS)))
        return dict(sorted(listed.items()))

    def _search(self, folder: Path, prefix: str, depth: int, listed: dict[str, Path], left: Iterator[int]) -> None:
        try:
            inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        except OSError:
            return
        for path in inner:
            if next(left, None) is None:
                return
            if _is_run(path):
                listed[prefix + path.name] = path
                listed.update({f"{prefix}{path.name}/{stage}": inside for stage, inside in stages(path).items()})
            elif depth > 1:
                self._search(path, f"{prefix}{path.name}/", depth - 1, listed, left)

    def newest(self) -> tuple[dict[str, Path], int]:
        """Returns the runs that are listed, those that were changed last, and how many runs there are."""
        listed = self.find()
        if len(listed) <= MOST_RUNS:
            return listed, len(listed)
        kept = sorted(listed, key=lambda name: _changed_s(listed[name]))[-MOST_RUNS:]
        return {name: listed[name] for name in sorted(kept)}, len(listed)

    def _directory(self, name: str) -> Path | None:
        """Returns the folder of the run ``name`` as ``find`` does, which may be one of very many."""
        if _is_run(self.folder):
            return self.find().get(name)
        *above, last = parts = name.split("/")
        if any(not part or part.startswith(".") or "\0" in part for part in parts):
            return None
        folder, is_stage = self.folder, last == "sft" and bool(above) and _is_run(self.folder.joinpath(*above))
        if len(parts) > DEPTH + is_stage:
            return None
        for part in above[:-1] if is_stage else above:
            folder = folder / part
            if _is_run(folder):
                return None
        directory = self.folder.joinpath(*parts)
        return directory if _is_run(directory) else None

    def open(self, name: str) -> OpenRun:
        """Returns the run ``name``. Raises ``UserError`` where there is none."""
        with self._lock:
            run = self._open.pop(name, None)
            if run is None or not _is_run(run.directory):
                try:
                    directory = self._directory(name)
                except OSError:  # No file system has such a name.
                    directory = None
                if directory is None:
                    raise UserError(f"there is no run '{name[:200]}' in {self.folder}; it may have been moved or removed")
                run = OpenRun(name, directory)
            self._open[name] = run
            while len(self._open) > MOST_OPEN:
                del self._open[next(iter(self._open))]
            return run

    def stamps(self) -> list[tuple[str, Stamp]]:
        """Returns the stamp of each listed run, which changes when it writes something."""
        return [(name, stamp_of(path)) for name, path in self.newest()[0].items()]

    def list(self) -> tuple[list[dict[str, Any]], int]:
        """Returns what the list says of each of its runs, and how many runs there are; what has not changed is not read again."""
        newest, count = self.newest()
        listed: dict[str, _Listed] = {}
        for name, path in newest.items():
            stamp, known = stamp_of(path), self._listed.get(name)
            listed[name] = known if known is not None and known.stamp == stamp else _Listed(stamp, listed_run(name, path))
        self._listed = listed
        return [each.entry for each in listed.values()], count


def _is_run(folder: Path) -> bool:
    return (folder / JOURNAL).is_file() or (folder / METRICS).is_file()


def _changed_s(folder: Path) -> float:
    """Returns when a run has written something last."""
    changed_s = 0.0
    for name in (METRICS, JOURNAL, f"{JOURNAL}-wal"):
        with contextlib.suppress(OSError):
            changed_s = max(changed_s, (folder / name).stat().st_mtime)
    return changed_s


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
