"""One run whose files are read while it grows: metrics as columns, the journal for single questions, the phases of its sidecars."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.dashboard.phases import Phases
from tandem.report.columns import Columns
from tandem.report.run_facts import RunFacts, facts_of
from tandem.report.samples import decoder
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.run_lock import lock_holder
from tandem.types import RunError

JOURNAL, METRICS = "journal.sqlite", "metrics.jsonl"
Stamp = tuple[Any, ...]


def stamp_of(directory: Path) -> Stamp:
    """Returns what changes when a run has written something."""
    found: list[Any] = []
    for name in (METRICS, JOURNAL, f"{JOURNAL}-wal"):
        try:
            status = (directory / name).stat()
        except OSError:
            found.append(None)
        else:
            # The log of the journal keeps its size where it is written from its beginning again.
            found.append((status.st_size, status.st_ino, status.st_mtime_ns))
    return (*found, lock_holder(directory))


@dataclass
class _Facts:
    stamp: Stamp
    facts: RunFacts | None
    problem: str


class OpenRun:
    """The run in ``directory``; ``name`` is its path below the folder of runs. Every method may be called on any thread."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.directory = name, directory
        self._lock = threading.RLock()
        self._columns = Columns(directory / METRICS)
        self._phases = Phases()
        self._facts: _Facts | None = None
        self._decoder: Callable[[Sequence[int]], str] | None = None

    @contextmanager
    def columns(self) -> Iterator[Columns]:
        """Yields the metrics of all steps so far, which stay as they are for the body."""
        with self._lock:
            self._columns.follow()
            yield self._columns

    @contextmanager
    def journal(self) -> Iterator[Journal]:
        """Yields the journal, open for reading and for the body alone, so that it never holds up the run. Raises ``RunError``."""
        with Journal(self.directory / JOURNAL, read_only=True, brief=True, busy_s=2.0) as journal:
            yield journal

    def facts(self) -> tuple[RunFacts | None, str]:
        """Returns what journal and recipe say, ``None`` where the journal cannot be read, and one line about what cannot be."""
        with self._lock:
            now = stamp_of(self.directory)
            if self._facts is None or self._facts.stamp != now:
                with self.columns() as columns:
                    last = columns.last_row()
                    rows = [] if last is None else [last]
                    problems = [columns.problem] if columns.problem else []
                facts = None
                try:
                    with self.journal() as journal:
                        facts = facts_of(self.directory, journal, rows)
                except RunError as error:
                    problems.insert(0, str(error))
                self._facts = _Facts(now, facts, "; ".join(problems))
            return self._facts.facts, self._facts.problem

    @contextmanager
    def phases(self, low: float | None = None, step: int | None = None) -> Iterator[Phases]:
        """Yields the phases so far: the newest, and if ``low`` (seconds since the first) or ``step`` is before them all. Raises ``RunError``."""
        with self._lock:
            with self.journal() as journal:
                self._phases.follow(journal)
                if not self._phases.covers(low, step):
                    self._phases.follow(journal, whole=True)
            yield self._phases

    def decode(self, journal: Journal) -> Callable[[Sequence[int]], str]:
        """Returns what makes text of token ids."""
        with self._lock:
            if self._decoder is None:
                self._decoder = decoder(journal, self.directory)
            return self._decoder
