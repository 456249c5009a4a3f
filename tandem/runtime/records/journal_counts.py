"""What the metrics of a run read of its journal while it runs: how often each kind of event has happened, and the newest evaluations."""

import contextlib
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any


class JournalCounts:
    """Reads the journal at ``path``, which need not exist yet, beside the process that writes it. A journal that cannot be read now has what it had before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._events: dict[str, int] = {}
        self._evaluations: dict[str, dict[str, Any]] = {}

    def read(self) -> tuple[dict[str, int], dict[str, dict[str, Any]]]:
        """Returns the number of events by kind, and the newest evaluation of each kind."""
        with self._lock, contextlib.suppress(sqlite3.Error, ValueError):
            if self._connection is None and self._path.is_file():
                self._connection = sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0, check_same_thread=False)
            if self._connection is not None:
                self._events = dict(self._connection.execute("SELECT kind, COUNT(*) FROM events GROUP BY kind"))
                newest = self._connection.execute("SELECT kind, result, MAX(step) FROM evaluations GROUP BY kind")
                self._evaluations = {kind: json.loads(result) for kind, result, _ in newest}
        return self._events, self._evaluations

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
