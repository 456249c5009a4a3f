"""The series of Prometheus in one SQLite file, of bounded size: written by one process, read by others."""

import json
import math
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.metrics_database.promql.evaluate import Series, matches
from tandem.metrics_database.promql.syntax import NAME, Matcher
from tandem.metrics_database.rules import Rules
from tandem.runtime.records.sqlite_file import close_last, connect, errors, transaction
from tandem.types import RunError

FILE = "metrics.sqlite"
"""The database of a run, next to its journal."""
_WHAT, _VERSION = "the metrics database", 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS series (id INTEGER PRIMARY KEY, name TEXT NOT NULL, labels TEXT NOT NULL UNIQUE);
CREATE INDEX IF NOT EXISTS series_by_name ON series (name);
CREATE TABLE IF NOT EXISTS samples (series INTEGER NOT NULL, time_ms INTEGER NOT NULL, value REAL, PRIMARY KEY (series, time_ms)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS state (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID
"""
_NAN = "nan"
"""SQLite has no NaN; NULL is the end of a series."""
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept. ``all_s``: seconds for which every sample is; after them the last one of each ``coarse_s`` stays, until ``whole_s``. ``most_bytes``: of the
    file; where that is less, the oldest samples go."""

    all_s: float = 86_400.0
    coarse_s: float = 60.0
    whole_s: float = 15 * 86_400.0
    most_bytes: int = 256 * 2**20


class MetricsWriter:
    """The one process that writes ``path``. Raises ``RunError`` where the file cannot be used."""

    def __init__(self, path: Path, retention: Retention) -> None:
        self.path, self.retention = path, retention
        self._connection = connect(path, _WHAT, _VERSION, _SCHEMA, durable=False)
        self._ids: dict[Labels, int] = {}
        with errors(path, _WHAT):
            for id, labels in self._connection.execute("SELECT id, labels FROM series"):
                self._ids[tuple(sorted(_labels(labels).items()))] = id

    def append(self, samples: Iterable[tuple[Labels, int, float | None]]) -> None:
        """Adds samples: the labels of the series with its name, milliseconds since 1970, and the value; ``None``: the series has ended for now."""
        with errors(self.path, _WHAT), transaction(self._connection):
            rows = [(self._id(labels), when, _NAN if value is not None and value != value else value) for labels, when, value in samples]
            self._connection.executemany("INSERT OR REPLACE INTO samples VALUES (?, ?, ?)", rows)

    def evaluate(self, rules: Rules, time_ms: int) -> None:
        """Adds the samples of ``rules`` at ``time_ms``: those of each recording rule before the next rule is evaluated."""
        for recording in rules.recording:
            self.append(rules.record(recording, self.read, time_ms))
        self.append([sample for alert in rules.alerts for sample in rules.alert(alert, self.read, time_ms)])

    def read(self, matchers: Sequence[Matcher], start_ms: int, end_ms: int) -> list[Series]:
        """As ``MetricsReader.read``."""
        with errors(self.path, _WHAT):
            return _series(self._connection, matchers, start_ms, end_ms)

    def _id(self, labels: Labels) -> int:
        found = self._ids.get(labels)
        if found is None:
            text = json.dumps(dict(labels), separators=(",", ":"))
            self._connection.execute("INSERT OR IGNORE INTO series (name, labels) VALUES (?, ?)", (dict(labels).get(NAME, ""), text))
            found = self._ids[labels] = int(self._connection.execute("SELECT id FROM series WHERE labels = ?", (text,)).fetchone()[0])
        return found

    def thin(self, now_s: float | None = None) -> None:
        """Removes what ``retention`` does not keep."""
        now_ms, kept = round((time.time() if now_s is None else now_s) * 1000), self.retention
        width = round(kept.coarse_s * 1000)
        until = (now_ms - round(kept.all_s * 1000)) // width * width
        with errors(self.path, _WHAT), transaction(self._connection):
            row = self._connection.execute("SELECT value FROM state WHERE key = 'thinned_ms'").fetchone()
            since = row[0] if row else 0
            for id in self._ids.values() if until > since else ():
                self._connection.execute(
                    "DELETE FROM samples WHERE series = ? AND time_ms >= ? AND time_ms < ? AND EXISTS (SELECT 1 FROM samples AS later "
                    "WHERE later.series = samples.series AND later.time_ms > samples.time_ms AND later.time_ms < (samples.time_ms / ? + 1) * ?)",
                    (id, since, until, width, width),
                )
            if until > since:
                self._connection.execute("INSERT OR REPLACE INTO state VALUES ('thinned_ms', ?)", (until,))
            self._forget(now_ms - round(kept.whole_s * 1000))
            while self._used() > kept.most_bytes:
                oldest, newest = self._connection.execute("SELECT MIN(time_ms), MAX(time_ms) FROM samples").fetchone()
                if oldest is None or oldest >= newest:
                    break
                self._forget(oldest + max(1, (newest - oldest) // 10))
            # A series without samples is one of a process that has ended.
            self._connection.execute("DELETE FROM series WHERE NOT EXISTS (SELECT 1 FROM samples WHERE samples.series = series.id)")
            there = {id for (id,) in self._connection.execute("SELECT id FROM series")}
        self._ids = {labels: id for labels, id in self._ids.items() if id in there}

    def _forget(self, before_ms: int) -> None:
        for id in self._ids.values():
            self._connection.execute("DELETE FROM samples WHERE series = ? AND time_ms < ?", (id, before_ms))

    def _used(self) -> int:
        pages, free, size = (self._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size"))
        return int((pages - free) * size)

    def close(self) -> None:
        close_last(self._connection, self.path)


def _series(connection: sqlite3.Connection, matchers: Sequence[Matcher], start_ms: int, end_ms: int) -> list[Series]:
    listed: list[Series] = []
    for id, labels in _matching(connection, matchers):
        samples = "SELECT time_ms, value FROM samples WHERE series = ? AND time_ms BETWEEN ? AND ? ORDER BY time_ms"
        rows = connection.execute(samples, (id, start_ms, end_ms)).fetchall()
        if rows:
            times, values = zip(*rows, strict=True)
            numbers = [math.nan if value == _NAN else value for value in values]
            if not all(isinstance(each, int) for each in times) or not all(isinstance(each, int | float | None) for each in numbers):
                raise sqlite3.DatabaseError("a sample is no number")
            listed.append(Series(tuple(sorted(labels.items())), times, numbers))
    return listed


def _matching(connection: sqlite3.Connection, matchers: Sequence[Matcher]) -> list[tuple[int, Mapping[str, str]]]:
    name = next((each.value for each in matchers if each.label == NAME and each.kind == "="), None)
    where, given = ("", ()) if name is None else (" WHERE name = ?", (name,))
    rows = connection.execute(f"SELECT id, labels FROM series{where}", given)
    listed = ((id, _labels(labels)) for id, labels in rows)
    return [(id, labels) for id, labels in listed if matches(labels, matchers)]


def _labels(text: Any) -> Mapping[str, str]:
    """Returns the labels of a series. Raises SQLite's error for damage where ``text`` has none."""
    try:
        labels = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        labels = None
    if not isinstance(labels, dict) or not all(isinstance(value, str) for value in labels.values()):
        raise sqlite3.DatabaseError("the labels of a series cannot be read")
    return labels


@dataclass(frozen=True, slots=True)
class MetricsReader:
    """Reads ``path`` while another process may write it; it is opened for each question alone. Raises ``RunError`` where there is none."""

    path: Path

    def read(self, matchers: Sequence[Matcher], start_ms: int, end_ms: int) -> list[Series]:
        """Returns the series that match, with their samples between two times, both included; those without any are left out."""
        with closing(connect(self.path, _WHAT, _VERSION, _SCHEMA, read_only=True, busy_s=2.0, brief=True)) as connection, errors(self.path, _WHAT):
            return _series(connection, matchers, start_ms, end_ms)

    def span_ms(self) -> tuple[int, int] | None:
        """Returns the times of the oldest and the newest sample, ``None`` without one."""
        try:
            series = self.read([Matcher(NAME, "=", "up")], 0, 2**62)
        except RunError:
            return None
        times = [(each.times[0], each.times[-1]) for each in series]
        return (min(first for first, _ in times), max(last for _, last in times)) if times else None
