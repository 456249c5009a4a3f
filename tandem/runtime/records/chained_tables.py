"""SQLite tables whose rows are covered by a chain of digests, so that a row that was changed, lost or inserted is found.

Every write appends an entry to the table ``chain``, in the same transaction: the row's table, its key and its digest. The digest of an entry covers
the entry before it. The numbers and digests of two entries are kept in a small file beside the database (``NAME.head``), without
which a cut at the end could not be seen: the newest entry, and the newest that was flushed to the disk. The head is written after the
transaction, so a process that dies in between leaves a head that is older than the table, which is valid.
"""

import fcntl
import os
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from tandem.runtime.records.sqlite_file import transaction

CHAIN_SCHEMA = """
CREATE TABLE IF NOT EXISTS chain (
    id INTEGER PRIMARY KEY, part TEXT NOT NULL, key TEXT NOT NULL, content BLOB NOT NULL, digest BLOB NOT NULL)
"""
_REMOVED = b""
_HEAD_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Table:
    """A table: ``columns`` in the order of its rows, of which the first ``keys`` are its primary key. ``covered``: the columns that the row's
    digest covers, all if empty."""

    columns: tuple[str, ...]
    keys: int = 1
    covered: tuple[str, ...] = ()


class DamagedRow(NamedTuple):
    """A row that is not as it was written; ``part`` is its table; or ``chain``, ``head``,
    ``unflushed`` (entries of which the head says that they were not flushed) or ``file``."""

    part: str
    key: str
    what: str


class _Entry(NamedTuple):
    id: int
    digest: bytes


_FIRST = _Entry(0, bytes(16))


class ChainedTables:
    """The chained tables of the open database ``path``. Several processes may write; SQLite orders them.

    Args:
        tables: by name.
        read_only: the head is not written.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path, tables: Mapping[str, Table], *, read_only: bool = False) -> None:
        self._connection, self._tables = connection, tables
        self._head_path = head_path(path)
        self._head_file = None if read_only else os.open(self._head_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._entry = self._newest() if not read_only else _FIRST
        if self._head_file is not None and self._entry == _FIRST:
            # A head that is left from a file that was here before.
            os.ftruncate(self._head_file, 0)

    def close(self) -> None:
        if self._head_file is not None:
            os.close(self._head_file)
            self._head_file = None

    @contextmanager
    def writing(self, is_durable: bool) -> Iterator[None]:
        """Commits all of the body's ``put`` and ``remove`` or none. ``is_durable``: the commit is flushed to the disk before the head is written."""
        with transaction(self._connection):
            before = self._entry = self._newest()
            yield
        if self._entry != before:
            self._write_head(is_durable)

    def put(self, table: str, row: Sequence[Any]) -> int:
        """Inserts a row, or replaces the one with its key; returns its rowid. An integer key that is ``None`` is chosen by SQLite."""
        spec = self._tables[table]
        marks = ", ".join("?" * len(row))
        rowid = int(self._connection.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", row).lastrowid or 0)
        whole = [rowid if row[0] is None else row[0], *row[1:]]
        self._append(table, _key(whole[: spec.keys]), _content(spec, whole))
        return rowid

    def remove(self, table: str, where: str, parameters: Sequence[Any]) -> None:
        """Deletes the rows that match ``where``."""
        keys = ", ".join(self._tables[table].columns[: self._tables[table].keys])
        with closing(self._connection.execute(f"SELECT {keys} FROM {table} WHERE {where}", parameters)) as cursor:
            removed = cursor.fetchall()
        self._connection.execute(f"DELETE FROM {table} WHERE {where}", parameters)
        for key in removed:
            self._append(table, _key(key), _REMOVED)

    def verify(self) -> list[DamagedRow]:
        """Returns what is not as it was written: [] where every row of every table, the chain and its head are. Raises ``sqlite3.Error`` if the
        file cannot be read."""
        damaged = [DamagedRow("file", "", trouble) for trouble in self._integrity()]
        newest, digests = _FIRST, {}
        live: dict[tuple[str, str], bytes] = {}
        heads = self._heads()
        wanted = {head.id for head in heads or ()}
        with closing(self._connection.execute("SELECT id, part, key, content, digest FROM chain ORDER BY id")) as cursor:
            for id, part, key, content, digest in cursor:
                expected = _link(newest, part, key, content) if newest.id + 1 == id else None
                if expected is None or expected.digest != digest:
                    damaged.append(DamagedRow("chain", str(id), "the digest of its entry does not cover the entry before it"))
                newest = _Entry(id, bytes(digest))
                if id in wanted:
                    digests[id] = newest.digest
                if content == _REMOVED:
                    live.pop((part, key), None)
                else:
                    live[part, key] = content
        return damaged + self._check_head(heads, newest, digests) + list(self._check_rows(live))

    def _check_head(self, heads: "tuple[_Entry, _Entry] | None", newest: _Entry, digests: Mapping[int, bytes]) -> list[DamagedRow]:
        name = self._head_path.name
        if heads is None:
            if newest == _FIRST:
                return []
            return [DamagedRow("head", "", f"{name} is missing or damaged")]
        durable, last = heads
        if durable.id > newest.id:
            return [DamagedRow("chain", str(durable.id), f"the newest {durable.id - newest.id} entries are lost")]
        if durable.id and digests.get(durable.id) != durable.digest:
            return [DamagedRow("chain", str(durable.id), f"its digest is not that of {name}")]
        if last.id > newest.id:
            return [DamagedRow("unflushed", str(last.id), f"the newest {last.id - newest.id} entries, which were not flushed to the disk, are lost")]
        if last.id and digests.get(last.id) != last.digest:
            return [DamagedRow("chain", str(last.id), f"its digest is not that of {name}")]
        return []

    def _check_rows(self, live: dict[tuple[str, str], bytes]) -> Iterator[DamagedRow]:
        for table, spec in self._tables.items():
            with closing(self._connection.execute(f"SELECT {', '.join(spec.columns)} FROM {table}")) as cursor:
                for row in cursor:
                    key = _key(row[: spec.keys])
                    content = live.pop((table, key), None)
                    if content is None:
                        yield DamagedRow(table, key, "the chain has no such row")
                    elif content != _content(spec, row):
                        yield DamagedRow(table, key, "it does not have the digest that it was written with")
        for table, key in live:
            yield DamagedRow(table, key, "it is lost")

    def _integrity(self) -> list[str]:
        with closing(self._connection.execute("PRAGMA integrity_check(1)")) as cursor:
            [(found,)] = cursor.fetchall()
        return [] if found == "ok" else [str(found).splitlines()[-1]]

    def _append(self, table: str, key: str, content: bytes) -> None:
        self._entry = _link(self._entry, table, key, content)
        self._connection.execute("INSERT INTO chain VALUES (?, ?, ?, ?, ?)", (self._entry.id, table, key, content, self._entry.digest))

    def _newest(self) -> _Entry:
        with closing(self._connection.execute("SELECT id, digest FROM chain ORDER BY id DESC LIMIT 1")) as cursor:
            row = cursor.fetchone()
        return _FIRST if row is None else _Entry(int(row[0]), bytes(row[1]))

    # -- the head ------------------------------------------------------------------------------------------------------

    def _write_head(self, is_durable: bool) -> None:
        """Two processes may commit in one order and come here in the other: the newer entry stays."""
        assert self._head_file is not None
        with _locked(self._head_file) as is_locked:
            before = _parse_head(os.pread(self._head_file, 200, 0))
            if not is_locked or (before is not None and before[1].id > self._entry.id):
                return
            durable = self._entry if is_durable else before[0] if before is not None else _FIRST
            os.pwrite(self._head_file, _head_text(durable, self._entry), 0)

    def _heads(self) -> tuple[_Entry, _Entry] | None:
        try:
            return _parse_head(self._head_path.read_bytes())
        except OSError:
            return None


def head_path(path: Path) -> Path:
    """Returns the path of the head of the database ``path``."""
    return path.with_name(f"{path.name}.head")


def _link(before: _Entry, table: str, key: str, content: bytes) -> _Entry:
    number = before.id + 1
    named = f"{table}\0{key}".encode("utf-8", "surrogatepass")
    return _Entry(number, blake2b(before.digest + struct.pack(">QI", number, len(named)) + named + content, digest_size=16).digest())


def _key(values: Sequence[Any]) -> str:
    return "/".join(map(str, values))


def _content(table: Table, row: Sequence[Any]) -> bytes:
    digest = blake2b(digest_size=16)
    for column, value in zip(table.columns, row, strict=True):
        if not table.covered or column in table.covered:
            kind, data = _ENCODERS[type(value)](value)
            digest.update(struct.pack(">cQ", kind, len(data)) + data)
    return digest.digest()


_ENCODERS: dict[type, Callable[[Any], tuple[bytes, bytes]]] = {
    type(None): lambda value: (b"n", b""),
    int: lambda value: (b"i", str(value).encode()),
    float: lambda value: (b"f", struct.pack(">d", value)),
    str: lambda value: (b"s", value.encode("utf-8", "surrogatepass")),
    bytes: lambda value: (b"b", value),
}


def _head_text(durable: _Entry, newest: _Entry) -> bytes:
    # Of constant length, so that it is overwritten in place by one write. Its own digest tells a damaged head from a cut table.
    text = "".join(f"{name} {entry.id:020d} {entry.digest.hex()}\n" for name, entry in (("flushed", durable), ("newest ", newest))).encode()
    return text + blake2b(text, digest_size=4).hexdigest().encode() + b"\n"


def _parse_head(text: bytes) -> tuple[_Entry, _Entry] | None:
    try:
        durable, newest = (_Entry(int(line.split()[1]), bytes.fromhex(line.split()[2])) for line in text.decode("ascii").splitlines()[:2])
    except (ValueError, IndexError):
        return None
    return (durable, newest) if _head_text(durable, newest) == text else None


@contextmanager
def _locked(descriptor: int) -> Iterator[bool]:
    """Yields whether the file is locked: a process that was stopped with the lock is not waited for."""
    end = time.monotonic() + _HEAD_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < end:
                time.sleep(0.001)
                continue
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        return
