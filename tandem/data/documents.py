"""Documents in files: JSON lines, or whole files as one text each, and how the work on them is divided.

A unit of work is a run of files and parts of files, found from sizes alone, so that every process and every repetition
divides the same data the same way.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from tandem.data.storage import Storage, StoredFile
from tandem.types import UserError

LINES = (".jsonl", ".ndjson")
COMPRESSED = ".gz"


@dataclass(frozen=True, slots=True)
class DocumentFormat:
    """``text_key``: which key of a JSON line holds the text. ``suffixes``: of files that are one document each, such as
    ``.txt`` (``.jsonl`` and ``.ndjson``, and both with ``.gz``, are always read)."""

    text_key: str = "text"
    suffixes: tuple[str, ...] = (".txt", ".md")

    def check(self) -> None:
        for suffix in self.suffixes:
            if not suffix.startswith(".") or suffix in (".", COMPRESSED, *LINES):
                raise UserError(f"the suffix '{suffix}' of whole documents must begin with a dot and be none of .jsonl, .ndjson and .gz")
        if not self.text_key:
            raise UserError("the key of the text is empty; name the key of a JSON line that holds its text")


class Part(NamedTuple):
    """Bytes ``start .. stop - 1`` of the file ``name``: of JSON lines those that begin there."""

    name: str
    start: int
    stop: int


def divide(files: Sequence[StoredFile], form: DocumentFormat, unit_bytes: int) -> list[tuple[Part, ...]]:
    """The units of ``files``, of about ``unit_bytes`` each: plain JSON lines are cut anywhere, every other file is whole."""
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


def documents(storage: Storage, part: Part, form: DocumentFormat) -> Iterator[tuple[str, int]]:
    """The texts of ``part`` in order, each with the bytes of its source. Raises ``UserError`` with file and byte for one that is
    broken."""
    with storage.open(part.name) as file:
        if part.name.endswith(LINES):
            yield from _lines(file, part, form)
        elif part.name.endswith(COMPRESSED) and part.name.removesuffix(COMPRESSED).endswith(LINES):
            yield from _compressed(file, part, form)
        else:
            content = file.read()
            yield _decode(content, part.name), len(content)


def _is_read(name: str, form: DocumentFormat) -> bool:
    return name.removesuffix(COMPRESSED).endswith(LINES) or name.endswith(form.suffixes)


def _lines(file: BinaryIO, part: Part, form: DocumentFormat) -> Iterator[tuple[str, int]]:
    at = part.start
    if at > 0:
        # The line that ends after the boundary belongs to the part before, unless it begins exactly here.
        file.seek(at - 1)
        at += len(file.readline()) - 1
    while at < part.stop:
        line = file.readline()
        if not line:
            return
        yield _text(line, f"{part.name}, the line at byte {at}", form), len(line)
        at += len(line)


def _compressed(file: BinaryIO, part: Part, form: DocumentFormat) -> Iterator[tuple[str, int]]:
    """``bytes`` here are those of the compressed file that were read meanwhile."""
    before = 0
    try:
        with gzip.open(file) as lines:
            for number, line in enumerate(lines, start=1):
                position = file.tell()
                yield _text(line, f"{part.name}, line {number}", form), position - before
                before = position
    except (EOFError, gzip.BadGzipFile) as error:
        raise UserError(f"{part.name} is damaged: {error}; fetch it again") from None


def _text(line: bytes, where: str, form: DocumentFormat) -> str:
    try:
        row = json.loads(_decode(line, where))
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get(form.text_key), str):
        there = ", ".join(map(repr, row)) if isinstance(row, dict) else "no object"
        raise UserError(f"{where}: there is no text under the key '{form.text_key}' (there is {there}); name the right key")
    text: str = row[form.text_key]
    return text


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 (byte {error.start + 1}); save it as UTF-8 or take it out") from None
