"""The embedded store: one SQLite file that every process of a run opens. Needs no server and survives ``kill -9``."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tandem.runtime.coordination.store import Conflict, Entry, Fenced, Guard, WatchTimeout
from tandem.runtime.records.sqlite_file import connect, errors, transaction

_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL,
    lease INTEGER REFERENCES leases(id) ON DELETE CASCADE);
CREATE TABLE IF NOT EXISTS leases (
    id INTEGER PRIMARY KEY AUTOINCREMENT, time_to_live_s REAL NOT NULL, ends_s REAL NOT NULL, boot TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS counter (only INTEGER PRIMARY KEY CHECK (only = 0), revision INTEGER NOT NULL);
INSERT OR IGNORE INTO counter VALUES (0, 0)
"""
_POLL_S = (0.002, 0.05)
_T = TypeVar("_T")


def boot_id() -> str:
    """Returns the id of this boot of the machine; readings of the monotonic clock compare only within one boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class EmbeddedStore:
    """A ``Store`` in the file ``path``. Leases use the machine's monotonic clock: setting the wall clock ends none, a reboot ends all. Entries
    matter only to running processes, so a commit does not wait for the disk."""

    def __init__(self, path: Path, *, busy_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock, self._boot = clock, boot_id()
        self._lock = threading.RLock()
        self._connection = connect(path, "the run's store", _VERSION, _SCHEMA, durable=False, busy_s=busy_s)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def get(self, key: str) -> Entry | None:
        entries = self._select("WHERE e.key = ?", key)
        return entries[0] if entries else None

    def list(self, prefix: str) -> Sequence[Entry]:
        return self._select("WHERE substr(e.key, 1, ?) = ? ORDER BY e.key", len(prefix), prefix)

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        with self._writing() as connection:
            return self._write(connection, key, value, lease)

    def compare_and_swap(self, key: str, expected_revision: int | None, value: bytes, lease: int | None = None, guard: Guard | None = None) -> int:
        with self._writing() as connection:
            if guard is not None:
                held = self.get(guard.key)
                if held is None or held.revision != guard.revision:
                    raise Fenced(guard, held)
            entry = self.get(key)
            if (entry.revision if entry else None) != expected_revision:
                raise Conflict(key, expected_revision, entry)
            return self._write(connection, key, value, lease)

    def delete(self, key: str) -> bool:
        with self._writing() as connection:
            if not connection.execute("DELETE FROM entries WHERE key = ?", (key,)).rowcount:
                return False
            connection.execute("UPDATE counter SET revision = revision + 1")
            return True

    def watch(self, key: str, after_revision: int, deadline_s: float) -> Entry:
        def newer() -> Entry | None:
            entry = self.get(key)
            return entry if entry is not None and entry.revision > after_revision else None

        return _poll(newer, deadline_s, f"key '{key}' did not change after revision {after_revision}")

    def watch_prefix(self, prefix: str, known: Sequence[Entry], deadline_s: float) -> Sequence[Entry]:
        def others() -> Sequence[Entry] | None:
            entries = self.list(prefix)
            return entries if list(entries) != list(known) else None

        return _poll(others, deadline_s, f"the keys under '{prefix}' did not change")

    def grant_lease(self, time_to_live_s: float) -> int:
        if not time_to_live_s > 0:
            raise ValueError(f"a lease's time to live is {time_to_live_s}; it must be above 0")
        with self._writing() as connection:
            row = (time_to_live_s, self._clock() + time_to_live_s, self._boot)
            cursor = connection.execute("INSERT INTO leases (time_to_live_s, ends_s, boot) VALUES (?, ?, ?)", row)
            return int(cursor.lastrowid or 0)

    def keep_alive(self, lease: int) -> None:
        with self._writing() as connection:
            query = "UPDATE leases SET ends_s = ? + time_to_live_s WHERE id = ?"
            if not connection.execute(query, (self._clock(), lease)).rowcount:
                raise LookupError(f"lease {lease} has expired")

    def revoke(self, lease: int) -> None:
        with self._writing() as connection:
            connection.execute("DELETE FROM leases WHERE id = ?", (lease,))

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Begins a transaction, in which expired leases and their keys are deleted first."""
        with self._lock, errors(self.path, "the run's store"), transaction(self._connection):
            query = "DELETE FROM leases WHERE ends_s <= ? OR boot != ?"
            if self._connection.execute(query, (self._clock(), self._boot)).rowcount:
                self._connection.execute("UPDATE counter SET revision = revision + 1")
            yield self._connection

    def _select(self, where: str, *parameters: str | int) -> Sequence[Entry]:
        # Readers skip expired rows; the next writer deletes them.
        live = "(l.id IS NULL OR (l.ends_s > ? AND l.boot = ?))"
        query = f"SELECT e.key, e.value, e.revision FROM entries e LEFT JOIN leases l ON e.lease = l.id {where}"
        query = query.replace("WHERE", f"WHERE {live} AND", 1)
        with self._lock, errors(self.path, "the run's store"):
            rows = self._connection.execute(query, (self._clock(), self._boot, *parameters)).fetchall()
        return [Entry(key, bytes(value), revision) for key, value, revision in rows]

    def _write(self, connection: sqlite3.Connection, key: str, value: bytes, lease: int | None) -> int:
        if lease is not None and not connection.execute("SELECT 1 FROM leases WHERE id = ?", (lease,)).fetchone():
            raise LookupError(f"lease {lease} has expired")
        connection.execute("UPDATE counter SET revision = revision + 1")
        revision = int(connection.execute("SELECT revision FROM counter").fetchone()[0])
        connection.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", (key, value, revision, lease))
        return revision


def _poll(look: Callable[[], _T | None], deadline_s: float, nothing: str) -> _T:
    """Returns the first result of ``look`` that is not ``None``. Raises ``WatchTimeout``, which says ``nothing``, past the deadline."""
    ends = time.monotonic() + deadline_s
    pause_s, longest_s = _POLL_S
    while True:
        seen = look()
        if seen is not None:
            return seen
        left = ends - time.monotonic()
        if left <= 0:
            raise WatchTimeout(f"{nothing} within {deadline_s:g} s")
        time.sleep(min(pause_s, left))
        pause_s = min(2 * pause_s, longest_s)
