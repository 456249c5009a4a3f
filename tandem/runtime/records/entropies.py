"""The entropy of the policy at each token of a run's samples, beside its journal: what nothing is computed from, and people look at."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tandem.runtime.records.sqlite_file import close_last, connect, errors
from tandem.types.errors import RunError
from tandem.types.token_entropies import TokenEntropies, decode_entropies
from tandem.types.wire import Buffer

FILE = "entropies.sqlite"
_WHAT, _VERSION = "the entropies of samples", 1
_SCHEMA = "CREATE TABLE IF NOT EXISTS entropies (step INTEGER PRIMARY KEY, sequences BLOB NOT NULL)"


class EntropyFile:
    """Writes the file ``entropies.sqlite`` of a run's folder. A disk that takes no more ends the file and not the run. ``say`` is told of that once."""

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = directory / FILE, say
        self._connection: sqlite3.Connection | None = None
        self._has_failed = False

    def write(self, step: int, entropies: Buffer) -> None:
        """Keeps those of ``step`` (``encode_entropies``), in the place of earlier ones of a step that is taken again."""
        if self._has_failed or not entropies:
            return
        try:
            if self._connection is None:
                self._connection = connect(self._path, _WHAT, _VERSION, _SCHEMA, durable=False)
            with errors(self._path, _WHAT):
                self._connection.execute("INSERT OR REPLACE INTO entropies VALUES (?, ?)", (step, entropies))
        except RunError as error:
            self._has_failed = True
            self._say(f"the entropies of tokens are not kept from step {step} on: {error}")

    def close(self) -> None:
        if self._connection is not None:
            close_last(self._connection, self._path)
            self._connection = None


def read_entropies(directory: Path, step: int) -> TokenEntropies:
    """Returns those of ``step``, empty where none were recorded. Raises ``RunError`` where the file is damaged."""
    path = directory / FILE
    if not path.is_file():
        return {}
    with closing(connect(path, _WHAT, _VERSION, _SCHEMA, read_only=True, busy_s=2.0, brief=True)) as connection, errors(path, _WHAT):
        row = connection.execute("SELECT sequences FROM entropies WHERE step = ?", (step,)).fetchone()
    if row is None:
        return {}
    try:
        return decode_entropies(row[0])
    except ValueError as error:
        raise RunError(f"{_WHAT}: {path} is damaged (step {step}: {error})") from None
