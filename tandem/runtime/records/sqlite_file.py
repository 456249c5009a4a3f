"""SQLite files that several processes share and that survive ``kill -9`` and, if ``durable``, power failures."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tandem.types.errors import RunError

DAMAGED = "is damaged"
"""In the error of a file that can be read no more."""
_MERGE_S = 2.0
"""How long the last writer of a file waits for readers, each of which has it open for milliseconds."""


def connect(
    path: Path, what: str, version: int, schema: str, *, read_only: bool = False, durable: bool = True, busy_s: float = 10.0,
    brief: bool = False,
) -> sqlite3.Connection:
    """Returns a connection in autocommit mode, with a write-ahead log. A file in which the schema was never committed, as after a disk that was full then,
    has no records: it is read as an empty one.

    Args:
        what: the file's name in errors.
        version: the number of its layout, kept in ``user_version``.
        read_only: nothing is written, also not beside the file: where no process has it open, it is read as it is (``immutable``), and what others write later
            may not be seen.
        brief: for a few reads at once, of a file of any size: a damaged page is found when it is read, not before.
        durable: flush every commit to the disk; without it a power failure may lose the newest commits, a ``kill -9`` none.

    Raises:
        RunError: the file is not a database, is damaged, has another layout or stays locked for ``busy_s`` seconds.
    """
    if read_only and not path.is_file():
        raise RunError(f"{what}: {path} does not exist")
    if not path.parent.is_dir():
        raise RunError(f"{what}: the folder {path.parent} does not exist")
    with errors(path, what):
        options = (path, what, version, schema, read_only, durable, busy_s, brief)
        if read_only and not _log_of(path).exists():
            try:
                return _opened(*options, is_immutable=True)
            except (RunError, sqlite3.Error):
                # A process that opened it in the meantime changes pages under an immutable reader.
                if not _log_of(path).exists():
                    raise
        return _opened(*options, is_immutable=False)


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _opened(
    path: Path, what: str, version: int, schema: str, read_only: bool, durable: bool, busy_s: float, brief: bool, *, is_immutable: bool
) -> sqlite3.Connection:
    target = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}{'&immutable=1' if is_immutable else ''}"
    connection = sqlite3.connect(target, uri=True, timeout=busy_s, isolation_level=None, check_same_thread=False)
    try:
        _prepare(connection, path, what, version, schema, read_only, durable, busy_s, brief)
        if read_only and connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0] == 0:
            connection.close()
            connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            connection.executescript(schema)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(
    connection: sqlite3.Connection, path: Path, what: str, version: int, schema: str, read_only: bool, durable: bool, busy_s: float,
    brief: bool,
) -> None:
    damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0] if not brief else "ok"
    if damage != "ok":
        raise RunError(f"{what}: {path} {DAMAGED} ({damage.splitlines()[-1]}); restore it from a copy or start a new run")
    layout = connection.execute("PRAGMA user_version").fetchone()[0]
    if layout not in (version, 0):
        raise RunError(f"{what}: {path} has layout {layout} and this version of tandem reads {version}; use the version that wrote it")
    if read_only:
        return
    _use_write_ahead_log(connection, busy_s)
    connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
    connection.execute("PRAGMA foreign_keys=ON")
    if layout == 0:
        # Two processes may open a new file at once; all statements are IF NOT EXISTS.
        with transaction(connection):
            for statement in schema.split(";"):
                if statement.strip():
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version={version}")


def _use_write_ahead_log(connection: sqlite3.Connection, busy_s: float) -> None:
    """SQLite does not wait for its timeout here: of two processes that open a new file at once, one fails immediately."""
    end = time.monotonic() + busy_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() >= end:
                raise
            time.sleep(0.01)


def close_last(connection: sqlite3.Connection, path: Path) -> None:
    """Closes the connection of the process that writes ``path`` and merges the write-ahead log, so that the file is whole by itself. SQLite leaves that to the
    connection that is closed last, and a reader, which may be that one, cannot: while one is in between, the log is merged a moment later."""
    connection.close()
    ends = time.monotonic() + _MERGE_S
    while _log_of(path).exists() and time.monotonic() < ends:
        time.sleep(0.02)
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=_MERGE_S)) as again:
                again.execute("PRAGMA user_version").fetchone()
        except sqlite3.Error:
            return


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commits all of the body's writes or none. The write lock is taken first, so that what the body reads cannot change."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


@contextmanager
def errors(path: Path, what: str) -> Iterator[None]:
    """Raises ``RunError`` for SQLite's errors, with the fix."""
    try:
        yield
    except sqlite3.Error as error:
        text = str(error)
        if "locked" in text or "busy" in text:
            raise RunError(f"{what}: {path} is locked by another process; stop that process and try again") from error
        if "disk is full" in text or "disk I/O error" in text:
            raise RunError(f"{what}: {path} cannot be written ({text}); make room on its disk and resume") from error
        if "unable to open" in text or "readonly" in text:
            raise RunError(f"{what}: {path} cannot be opened for writing ({text}); check who owns it") from error
        raise RunError(f"{what}: {path} {DAMAGED} ({text}); restore it from a copy or start a new run") from error


def snapshot(path: Path, target: Path, what: str) -> None:
    """Writes the state of the SQLite file ``path``, which others may be writing, to the new file ``target``. ``what`` names it in errors.
    Raises ``RunError``."""
    target.unlink(missing_ok=True)
    with errors(path, what), closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source, closing(sqlite3.connect(target)) as copy:
        source.backup(copy)
