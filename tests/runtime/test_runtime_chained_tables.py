import multiprocessing
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tandem.runtime.records.chained_tables import CHAIN_SCHEMA, ChainedTables, Table, head_path
from tandem.runtime.records.sqlite_file import connect

SCHEMA = "CREATE TABLE IF NOT EXISTS facts (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT, value REAL, blob BLOB);" + CHAIN_SCHEMA
TABLES = {"facts": Table(("id", "name", "value", "blob"))}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "facts.sqlite"


@pytest.fixture
def tables(path: Path) -> Iterator[ChainedTables]:
    with closing(connect(path, "the facts", 1, SCHEMA)) as connection, closing(ChainedTables(connection, path, TABLES)) as opened:
        yield opened


def fill(tables: ChainedTables, count: int, is_durable: bool = True) -> None:
    for number in range(count):
        with tables.writing(is_durable):
            tables.put("facts", (None, f"fact {number}", number / 7, bytes([number])))


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute(statement).rowcount == 1


def test_tables_as_they_were_written_have_no_damage(tables: ChainedTables) -> None:
    assert tables.verify() == []
    fill(tables, 5)
    with tables.writing(False):
        tables.put("facts", (3, "replaced", None, None))
        tables.remove("facts", "id > ?", (4,))
    assert tables.verify() == []


@pytest.mark.parametrize(
    ("statement", "damage"),
    [
        ("UPDATE facts SET value = value + 1e-15 WHERE id = 2", ("facts", "2")),
        ("UPDATE facts SET name = 'fact 1 ' WHERE id = 2", ("facts", "2")),
        ("UPDATE facts SET value = '0.5' || 'x' WHERE id = 4", ("facts", "4")),
        ("UPDATE facts SET blob = NULL WHERE id = 1", ("facts", "1")),
        ("DELETE FROM facts WHERE id = 3", ("facts", "3")),
        ("INSERT INTO facts VALUES (9, 'new', 0.0, NULL)", ("facts", "9")),
        ("UPDATE chain SET content = x'00' WHERE id = 3", ("chain", "3")),
        ("DELETE FROM chain WHERE id = 3", ("chain", "4")),
        ("UPDATE facts SET id = 8 WHERE id = 5", ("facts", "8")),
    ],
)
def test_a_row_that_no_writer_wrote_so_is_named(tables: ChainedTables, path: Path, statement: str, damage: tuple[str, str]) -> None:
    fill(tables, 5)
    change(path, statement)
    assert damage in {(row.part, row.key) for row in tables.verify()}


def test_a_removed_row_that_is_back_is_named(tables: ChainedTables, path: Path) -> None:
    fill(tables, 2)
    with tables.writing(True):
        tables.remove("facts", "id = ?", (2,))
    change(path, "INSERT INTO facts VALUES (2, 'fact 1', 0.14285714285714285, x'01')")
    assert [row[:2] for row in tables.verify()] == [("facts", "2")]


def cut(path: Path, entries: int) -> None:
    """Removes the newest rows together with their entries, as the loss of a write-ahead log does."""
    with closing(sqlite3.connect(path)) as connection, connection:
        (newest,) = connection.execute("SELECT MAX(id) FROM chain").fetchone()
        connection.execute("DELETE FROM facts WHERE id > ?", (newest - entries,))
        connection.execute("DELETE FROM chain WHERE id > ?", (newest - entries,))


def test_a_cut_of_flushed_rows_is_seen_by_the_head(tables: ChainedTables, path: Path) -> None:
    fill(tables, 5)
    cut(path, 2)
    assert [(row.part, row.what) for row in tables.verify()] == [("chain", "the newest 2 entries are lost")]


def test_a_cut_of_rows_that_were_not_flushed_is_told_apart(tables: ChainedTables, path: Path) -> None:
    fill(tables, 3)
    fill(tables, 2, is_durable=False)
    cut(path, 1)
    assert [row.part for row in tables.verify()] == ["unflushed"]
    cut(path, 2)
    assert [row.part for row in tables.verify()] == ["chain"]


def test_a_head_that_is_older_than_the_table_is_valid_and_a_damaged_one_is_not_taken_for_a_cut(tables: ChainedTables, path: Path) -> None:
    fill(tables, 3)
    older = head_path(path).read_bytes()
    fill(tables, 2)
    newer = head_path(path).read_bytes()
    head_path(path).write_bytes(older)
    assert tables.verify() == []
    for place in range(len(newer)):
        head_path(path).write_bytes(newer[:place] + bytes([newer[place] ^ 1]) + newer[place + 1 :])
        assert [row.part for row in tables.verify()] == ["head"]
    head_path(path).unlink()
    assert [row.part for row in tables.verify()] == ["head"]


def write_many(path: Path, count: int) -> None:
    with closing(connect(path, "the facts", 1, SCHEMA)) as connection, closing(ChainedTables(connection, path, TABLES)) as opened:
        fill(opened, count, is_durable=False)


def test_processes_that_write_at_once_share_one_chain(tables: ChainedTables, path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(path, 40)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert tables.verify() == []
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT COUNT(*), MAX(id) FROM chain").fetchone() == (120, 120)


def test_a_transaction_that_fails_leaves_neither_rows_nor_entries(tables: ChainedTables, path: Path) -> None:
    fill(tables, 2)
    with pytest.raises(ZeroDivisionError), tables.writing(True):
        tables.put("facts", (None, "never", 0.0, None))
        1 / 0  # noqa: B018
    fill(tables, 1)
    assert tables.verify() == []
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT COUNT(*) FROM facts").fetchone() == (3,)
