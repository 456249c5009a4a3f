"""Reads the rows of a data file, of a folder of ``datasets`` or of a dataset of the Hugging Face Hub."""

import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tandem.data.rows.arrow_rows import arrow_table, parquet_table, table_rows
from tandem.data.rows.csv_rows import csv_rows
from tandem.data.rows.json_rows import json_array, json_lines
from tandem.data.rows.row import Row, Rows
from tandem.runtime.machine.available_memory import total_bytes
from tandem.types import UserError
from tandem.types.input_file import read_input

BYTES_PER_BYTE = 4
"""Memory for each byte of a file of text, at least: its content, its lines, its texts and its items."""
FORMATS = "JSON lines (.jsonl), JSON (.json), CSV (.csv, .tsv), Parquet or Arrow"
DEFAULT_SPLIT = "train"
HUB_PREFIX = "hf://datasets/"
SEPARATORS = {".csv": ",", ".tsv": "\t"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_OTHER_FORMATS = (
    (b"PK\x03\x04", "a zip or Excel file; save it as CSV or JSON lines"),
    (b"\x80\x04", "a pickle; save it as Parquet or JSON lines"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd; unpack it, or compress it with gzip"),
    (b"BZh", "compressed with bzip2; unpack it, or compress it with gzip"),
    (b"\xfd7zXZ", "compressed with xz; unpack it, or compress it with gzip"),
    (b"SQLite format 3", "an SQLite database; save a table of it as CSV or JSON lines"),
)


@dataclass(frozen=True, slots=True)
class Source:
    """Where rows are read from: ``path`` is a file, a folder, or a name on the Hub, of which ``subset``, ``split`` and ``revision`` name a part.
    ``key``: the key of the recipe that names it, for messages."""

    path: str
    subset: str = ""
    split: str = ""
    revision: str = ""
    key: str = "task.path"

    def of_file(self) -> None:
        """Raises ``UserError`` if a part of a dataset is named, which a file does not have."""
        for name, value in (("subset", self.subset), ("split", self.split if self.split != DEFAULT_SPLIT else ""), ("revision", self.revision)):
            if value:
                raise UserError(f"'{self.path}' is a file and has no {name} '{value}'; leave the {name} out, or name the file that holds it")


def read_rows(source: Source) -> Rows:
    """Returns the rows of ``source``. Raises ``UserError`` if it does not exist, is empty or of a format that is not read."""
    path = Path(source.path)
    if not source.path.startswith(HUB_PREFIX) and path.is_dir():
        from tandem.data.rows.hub_rows import folder_rows

        return folder_rows(source)
    if source.path.startswith(HUB_PREFIX) or (_HUB_NAME.fullmatch(source.path) and not path.exists() and not _is_data_name(path)):
        from tandem.data.rows.hub_rows import hub_rows

        return hub_rows(source)
    source.of_file()
    return file_rows(source.path, source.key)


def file_rows(path: str, key: str = "task.path") -> Rows:
    """Returns the rows of a file: Parquet, Arrow and gzip are told from the first bytes, CSV by the name, everything else is JSON. Raises as
    ``read_rows``."""
    most = total_bytes() // BYTES_PER_BYTE
    try:
        content = read_input(path, most, "split it, or use a machine with more memory: all of it is held")
    except FileNotFoundError:
        raise UserError(f"'{path}' does not exist; name the file in '{key}'{_similar(Path(path))}") from None
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}") from None
    digest, name = hashlib.blake2b(content, digest_size=16).hexdigest(), path
    if content.startswith(b"\x1f\x8b"):
        content, name = _unpacked(content, path, most), path.removesuffix(".gz")
    kind, rows = _rows_of(content, path, Path(name).suffix.lower(), total_bytes())
    read = tuple(rows)
    if not read:
        raise UserError(f"'{path}' is empty; it needs at least one row ({FORMATS})")
    return Rows(path, kind, read, digest)


def _rows_of(content: bytes, path: str, suffix: str, most_bytes: int) -> tuple[str, Iterable[Row]]:
    if content.startswith(b"PAR1"):
        return "Parquet", table_rows(parquet_table(content, path, most_bytes), path)
    if content.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "Arrow", table_rows(arrow_table(content, path, most_bytes), path)
    for first, what in _OTHER_FORMATS:
        if content.startswith(first):
            raise UserError(f"'{path}' is {what}; {FORMATS} are read")
    if content and suffix in (".parquet", ".arrow", ".feather"):
        raise UserError(f"'{path}' is not a {suffix.removeprefix('.').title()} file: its first bytes are {content[:4]!r}; name the file by what it holds")
    if suffix in SEPARATORS:
        return "CSV", csv_rows(content, path, SEPARATORS[suffix])
    if suffix == ".json" and content.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
        return "JSON", json_array(content, path)
    return "JSON lines", json_lines(content, path)


def _unpacked(content: bytes, path: str, most: int) -> bytes:
    try:
        with gzip.open(io.BytesIO(content)) as file:
            unpacked = file.read(most + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"'{path}' is not a whole gzip file: {error}; compress or download it again") from None
    if len(unpacked) > most:
        raise UserError(f"'{path}' has more than {most:,} bytes when it is unpacked, more than this machine can hold; split it")
    return unpacked


def _is_data_name(path: Path) -> bool:
    return path.suffix.lower() in (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather", ".gz", ".txt")


def _similar(path: Path) -> str:
    """Returns the files of the same stem or format in the folder of ``path``, or which folder is missing, for messages."""
    if not path.parent.is_dir():
        return f"; there is no folder '{path.parent}'"
    there = sorted(found.name for found in path.parent.iterdir() if found.is_file() and (found.stem == path.stem or _is_data_name(found)))
    return f"; the folder has {', '.join(there[:5])}" if there else ""
