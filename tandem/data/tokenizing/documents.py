"""Documents in files, and how the work on them is divided.

Sources are JSON lines, WebDataset shards and whole files that are one text each. A JSON object contains a text, or an example for
supervised fine-tuning. A unit of work is a list of files and parts of files. It depends on names and sizes only, so that every process
divides the same data in the same way.
"""

import gzip
import json
import os
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, BinaryIO, NamedTuple, cast

from tandem.data.examples import BrokenExample, Example, read_example, read_pair
from tandem.data.rows.arrow_rows import arrow_table, import_pyarrow, parquet_table, table_rows
from tandem.data.webdataset import TARS, samples
from tandem.runtime.machine.available_memory import total_bytes
from tandem.storage.files import Storage, StoredFile
from tandem.text.long_text import ENCODING_BYTES_PER_BYTE
from tandem.text.surrogates import has_lone_surrogate
from tandem.types import UserError

SKIPPED_AT_ONCE = 2**20
LINES = (".jsonl", ".ndjson")
COMPRESSED = ".gz"
TABLES = (".parquet", ".arrow")
JSON = ".json"


@dataclass(frozen=True, slots=True)
class DocumentFormat:
    """Describes which files contain documents and how to read them.

    ``text_key``: the key of a JSON object that contains the text. ``suffixes``: of files, and of members of WebDataset shards, that are one
    document each, such as ``.txt``; JSON lines (``.jsonl``, ``.ndjson``, both also with ``.gz``), tables (``.parquet``, ``.arrow``, whose rows are
    like JSON objects) and shards (``.tar``, ``.tar.gz``, ``.tgz``) are always read. ``exclude``: shell patterns of file names to leave out; ``*``
    also matches slashes. ``skip_broken``: count and leave out documents that cannot be read instead of raising. ``examples``: a JSON object
    contains a prompt under ``prompt_key`` and its completion under ``completion_key``, or a conversation under ``messages``; files of other kinds
    are not read. ``pairs``: a JSON object contains a preference pair (``rows.preference_rows``); likewise. ``margin_key``:
    the key of a pair's margin, empty if pairs have none.
    """

    text_key: str = "text"
    suffixes: tuple[str, ...] = (".txt", ".md")
    exclude: tuple[str, ...] = ()
    skip_broken: bool = False
    examples: bool = False
    prompt_key: str = "prompt"
    completion_key: str = "completion"
    pairs: bool = False
    margin_key: str = ""

    @property
    def has_masks(self) -> bool:
        """Whether documents come with a mask of the learned tokens."""
        return self.examples or self.pairs

    def check(self) -> None:
        for suffix in self.suffixes:
            if not suffix.startswith(".") or suffix in (".", COMPRESSED, *LINES, *TABLES, *TARS):
                kinds = ", ".join((*LINES, *TABLES, *TARS))
                raise UserError(f"the suffix '{suffix}' of whole documents must begin with a dot and must not be one of {kinds} and {COMPRESSED}")
        for name, key in (("text", self.text_key), ("prompt", self.prompt_key), ("completion", self.completion_key)):
            if not key:
                raise UserError(f"the key of the {name} is empty; name the key of a JSON line that holds it")
        if self.margin_key and not self.pairs:
            raise UserError(f"the key of the margin is '{self.margin_key}', and only preference pairs have a margin; leave it out, or read pairs")
        if self.examples and self.pairs:
            raise UserError("a JSON object is either an example or a preference pair; choose one of the two")
        if self.has_masks and self.suffixes:
            raise UserError(f"examples are JSON objects, and '{self.suffixes[0]}' names whole files; leave the suffix out")


class Document(NamedTuple):
    """One document. ``text`` is ``None`` if it is broken; ``problem`` then says why in one line. ``size``: bytes of its source.
    ``place``: its file and position. ``examples``: the example that the text belongs to, or the chosen and the rejected one of a pair."""

    text: str | None
    size: int
    place: str = ""
    problem: str = ""
    examples: tuple[Example, ...] = ()


class Part(NamedTuple):
    """Bytes ``start .. stop - 1`` of the file ``name``; of JSON lines, the lines that begin in them."""

    name: str
    start: int
    stop: int


def divide(files: Sequence[StoredFile], form: DocumentFormat, unit_bytes: int) -> list[tuple[Part, ...]]:
    """Returns the units of ``files``, of about ``unit_bytes`` each. Only plain JSON lines are divided; every other file is read whole."""
    units: list[tuple[Part, ...]] = []
    open_parts: list[Part] = []
    room = unit_bytes
    for name, size in files:
        start = 0
        while start < size and _is_read(name, form):
            stop = min(start + room, size) if name.endswith(LINES) else size
            open_parts.append(Part(name, start, stop))
            room -= stop - start
            start = stop
            if room <= 0:
                units.append(tuple(open_parts))
                open_parts, room = [], unit_bytes
    return [*units, tuple(open_parts)] if open_parts else units


def check_whole(storage: Storage, files: Sequence[StoredFile], form: DocumentFormat) -> None:
    """Raises ``UserError`` for a large file with a hole, which reads as bytes 0 and is not text: a sparse file may have more bytes than its disk."""
    for name, size in files:
        path = storage.local(name)
        if path is None or size <= SKIPPED_AT_ONCE or not _is_read(name, form):
            continue
        with path.open("rb") as file:
            try:
                hole = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
            except OSError:  # A file system without holes.
                continue
        if hole < size:
            raise UserError(f"'{path}' has a hole at byte {hole:,} of {size:,}: it is a sparse file, not text; restore it, or leave it out with --exclude")


def documents(storage: Storage, part: Part, form: DocumentFormat) -> Iterator[Document]:
    """Returns the documents of ``part`` in order. Raises ``UserError`` for a broken one unless ``form.skip_broken`` is set."""
    for document in _documents(storage, part, form):
        if document.text is None and not form.skip_broken:
            raise refused(document.place, document.problem)
        yield document


def refused(place: str, problem: str) -> UserError:
    """Returns the error for a broken document."""
    return UserError(f"{place}: {problem}; correct it, remove it or skip broken documents")


def _documents(storage: Storage, part: Part, form: DocumentFormat) -> Iterator[Document]:
    with storage.open(part.name) as file:
        if part.name.endswith(LINES):
            yield from _lines(file, part, form)
        elif part.name.endswith(COMPRESSED) and part.name.removesuffix(COMPRESSED).endswith(LINES):
            yield from _compressed(file, part, form)
        elif part.name.endswith(TARS):
            yield from _shard(file, part, form)
        elif part.name.endswith(TABLES):
            yield from _table(file, part, form)
        elif part.stop - part.start > most_bytes():
            yield Document(None, part.stop - part.start, part.name, _too_large(part.stop - part.start))
        else:
            yield _document(file.read(), part.name)


def _is_read(name: str, form: DocumentFormat) -> bool:
    if any(fnmatchcase(name, pattern) for pattern in form.exclude):
        return False
    return name.removesuffix(COMPRESSED).endswith(LINES) or name.endswith((*TARS, *TABLES, *form.suffixes))


@cache
def most_bytes() -> int:
    """Returns the bytes of the largest document that this machine has the memory to tokenize."""
    return total_bytes() // ENCODING_BYTES_PER_BYTE


def _too_large(size: int) -> str:
    return (
        f"it has {size:,} bytes or more, and tokenizing takes at least {ENCODING_BYTES_PER_BYTE} bytes of memory for each: split it into documents of at "
        f"most {most_bytes():,} bytes"
    )


def _lines(file: BinaryIO, part: Part, form: DocumentFormat) -> Iterator[Document]:
    at = part.start
    if at > 0:
        # A line that ends after the boundary belongs to the previous part, unless it begins exactly here.
        file.seek(at - 1)
        at += _skip_line(file, part.stop - at + 1) - 1
    while at < part.stop:
        line = file.readline(most_bytes() + 1)
        if not line:
            return
        place, size = f"{part.name}, the line at byte {at}", len(line)
        if size > most_bytes():
            # The parts that the line reaches into have no other one that begins before its end.
            size += 0 if line.endswith(b"\n") else _skip_line(file, max(part.stop - at - size, 0))
            yield Document(None, size, place, _too_large(size))
        else:
            yield _document(line, place, form)
        at += size


def _skip_line(file: BinaryIO, most: int) -> int:
    """Reads to the end of the line, or ``most`` bytes. Returns the bytes read."""
    skipped = 0
    while skipped < most:
        chunk = file.readline(min(SKIPPED_AT_ONCE, most - skipped))
        skipped += len(chunk)
        if not chunk or chunk.endswith(b"\n"):
            break
    return skipped


def _compressed(file: BinaryIO, part: Part, form: DocumentFormat) -> Iterator[Document]:
    """Returns the documents of compressed JSON lines. Their sizes are compressed bytes."""
    before = 0
    try:
        with gzip.open(file) as lines:
            number = 0
            while line := lines.readline(most_bytes() + 1):
                number += 1
                place, position = f"{part.name}, line {number}", file.tell()
                if len(line) > most_bytes():
                    yield Document(None, part.stop - before, place, _too_large(len(line)))
                    return
                yield _document(line, place, form)._replace(size=position - before)
                before = position
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield Document(None, part.stop - before, part.name, f"damaged: {error}")


def _shard(file: BinaryIO, part: Part, form: DocumentFormat) -> Iterator[Document]:
    """Returns a document for each sample of a WebDataset shard: its first member of ``form.suffixes``, or else its JSON object."""
    kinds = (*form.suffixes, JSON)
    before = 0
    try:
        with ExitStack() as stack:
            archive = file if part.name.endswith(TARS[0]) else cast(BinaryIO, stack.enter_context(gzip.open(file)))
            for sample in samples(archive, kinds, most_bytes()):
                kind = next(kind for kind in kinds if kind in sample)
                name, content = sample[kind]
                position = file.tell()
                place = f"{part.name}, member {name}"
                yield _document(content, place, form if kind == JSON else None)._replace(size=position - before)
                before = position
            while archive.read(2**16):
                pass  # A gzip checksum is at the end of the file.
    except (tarfile.TarError, ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield Document(None, part.stop - before, part.name, f"damaged: {error}")
        return
    if before == 0:
        yield Document(None, part.stop, part.name, f"no member ends in {' or '.join(kinds)}")


def _table(file: BinaryIO, part: Part, form: DocumentFormat) -> Iterator[Document]:
    """Returns the documents of a Parquet or Arrow file, which is read whole. The last one has the size of all of it."""
    import_pyarrow(part.name)
    size, content = part.stop - part.start, file.read()
    try:
        read = parquet_table if content.startswith(b"PAR1") else arrow_table
        rows = list(table_rows(read(content, part.name, total_bytes()), part.name))
    except UserError as error:
        yield Document(None, size, part.name, str(error).partition(";")[0].removeprefix(f"'{part.name}' "))
        return
    for number, row in enumerate(rows, start=1):
        own = size if number == len(rows) else 0
        yield Document(None, own, row.where, row.problem) if row.values is None else _of_object(row.values, own, row.where, form)


def _document(content: bytes, where: str, form: DocumentFormat | None = None) -> Document:
    """Returns ``content`` as text, or with a ``form`` as a JSON object."""

    def broken(problem: str) -> Document:
        return Document(None, len(content), where, problem)

    if len(content) > most_bytes():
        return broken(_too_large(len(content)))
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        return broken(f"not UTF-8 (byte {error.start + 1})")
    if form is None:
        return Document(text, len(content), where)
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        return broken(f"not valid JSON: {error}")
    if has_lone_surrogate(text, row):
        return broken("it contains half of a surrogate pair, which is not a character")
    return _of_object(row, len(content), where, form)


def _of_object(row: Any, size: int, where: str, form: DocumentFormat) -> Document:
    """Returns the example or the text in a JSON object of ``size`` bytes."""
    if form.has_masks:
        try:
            examples = read_pair(row, form.margin_key) if form.pairs else (read_example(row, form.prompt_key, form.completion_key),)
        except BrokenExample as error:
            return Document(None, size, where, str(error))
        return Document(examples[0].text, size, where, examples=examples)
    if not isinstance(row, dict) or not isinstance(row.get(form.text_key), str):
        there = f"it has {', '.join(map(repr, row)) or 'no keys'}" if isinstance(row, dict) else "it is not a JSON object"
        return Document(None, size, where, f"there is no text under the key '{form.text_key}' ({there})")
    return Document(str(row[form.text_key]), size, where)
