"""What the metrics of a run read of its journal while it runs: how often each kind of event has happened, and the newest evaluations."""

import contextlib
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

from tandem.runtime.records.checkpoint_tiers import KEY as TIERS
from tandem.runtime.records.checkpoint_tiers import TierState, states_of


class JournalCounts:
    """Reads the journal at ``path``, which need not exist yet, beside the process that writes it. A journal that cannot be read now has what it had before.

    Each read has a connection of its own, which may write: the last connection of a file writes its log back and removes it, and one that is read-only
    or stays open would leave the log behind when the journal is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._events: dict[str, int] = {}
        self._evaluations: dict[str, dict[str, Any]] = {}
        self._tiers: list[TierState] = []

    def read(self) -> tuple[dict[str, int], dict[str, dict[str, Any]], list[TierState]]:
        """Returns the number of events by kind, the newest evaluation of each kind, and the tiers of checkpoints."""
        with self._lock, contextlib.suppress(sqlite3.Error, ValueError), contextlib.closing(self._connect()) as connection:
            connection.execute("PRAGMA query_only=ON")
            self._events = dict(connection.execute("SELECT kind, COUNT(*) FROM events GROUP BY kind"))
            newest = connection.execute("SELECT kind, result, MAX(step) FROM evaluations GROUP BY kind")
            self._evaluations = {kind: json.loads(result) for kind, result, _ in newest}
            tiers = connection.execute("SELECT value FROM run WHERE key = ?", (TIERS,)).fetchone()
            self._tiers = [] if tiers is None else states_of(json.loads(tiers[0]))
        return self._events, self._evaluations, self._tiers

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=rw", uri=True, timeout=1.0)
