"""Documents in files: JSON lines, or whole files as one text each, and how the work on them is divided.

A line holds a text, or an example for supervised fine-tuning.

A unit of work is a run of files and parts of files, found from sizes alone, so that every process and every repetition
divides the same data the same way.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import BinaryIO, NamedTuple

from tandem.data.examples import BrokenExample, Example, read_example
from tandem.storage.files import Storage, StoredFile
from tandem.types import UserError

LINES = (".jsonl", ".ndjson")
COMPRESSED = ".gz"


@dataclass(frozen=True, slots=True)
class DocumentFormat:
    """``text_key``: which key of a JSON line holds the text. ``suffixes``: of files that are one document each, such as
    ``.txt`` (``.jsonl`` and ``.ndjson``, and both with ``.gz``, are always read). ``exclude``: patterns of names that are left
    out, as a shell writes them; ``*`` takes in slashes. ``skip_broken``: documents that cannot be read are counted and left out
    instead of ending the work. ``examples``: lines hold a prompt under ``prompt_key`` and its completion under ``completion_key``,
    or a conversation under ``messages``; files of other kinds are not read."""

    text_key: str = "text"
    suffixes: tuple[str, ...] = (".txt", ".md")
    exclude: tuple[str, ...] = ()
    skip_broken: bool = False
    examples: bool = False
    prompt_key: str = "prompt"
    completion_key: str = "completion"

    def check(self) -> None:
        for suffix in self.suffixes:
            if not suffix.startswith(".") or suffix in (".", COMPRESSED, *LINES):
                raise UserError(f"the suffix '{suffix}' of whole documents must begin with a dot and be none of .jsonl, .ndjson and .gz")
        for name, key in (("text", self.text_key), ("prompt", self.prompt_key), ("completion", self.completion_key)):
            if not key:
                raise UserError(f"the key of the {name} is empty; name the key of a JSON line that holds it")
        if self.examples and self.suffixes:
            raise UserError(f"examples stand in JSON lines, and '{self.suffixes[0]}' names whole files; leave the suffix out")


class Document(NamedTuple):
    """``text`` is ``None`` for one that is broken; ``problem`` then says in a line why. ``place``: where it stands. ``size``: bytes of
    its source. ``example``: what the text belongs to, where the format is of examples."""

    text: str | None
    size: int
    place: str = ""
    problem: str = ""
    example: Example | None = None


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


def documents(storage: Storage, part: Part, form: DocumentFormat) -> Iterator[Document]:
    """The documents of ``part`` in order. Raises ``UserError`` for one that is broken unless those are skipped."""
    for document in _documents(storage, part, form):
        if document.text is None and not form.skip_broken:
            raise refused(document.place, document.problem)
        yield document


def refused(place: str, problem: str) -> UserError:
    """What ends the work on a document that is broken."""
    return UserError(f"{place}: {problem}; mend it, take it out or skip what is broken")


def _documents(storage: Storage, part: Part, form: DocumentFormat) -> Iterator[Document]:
    with storage.open(part.name) as file:
        if part.name.endswith(LINES):
            yield from _lines(file, part, form)
        elif part.name.endswith(COMPRESSED) and part.name.removesuffix(COMPRESSED).endswith(LINES):
            yield from _compressed(file, part, form)
        else:
            content = file.read()
            yield _document(content, part.name)


def _is_read(name: str, form: DocumentFormat) -> bool:
    if any(fnmatchcase(name, pattern) for pattern in form.exclude):
        return False
    return name.removesuffix(COMPRESSED).endswith(LINES) or name.endswith(form.suffixes)


def _lines(file: BinaryIO, part: Part, form: DocumentFormat) -> Iterator[Document]:
    at = part.start
    if at > 0:
        # The line that ends after the boundary belongs to the part before, unless it begins exactly here.
        file.seek(at - 1)
        at += len(file.readline()) - 1
    while at < part.stop:
        line = file.readline()
        if not line:
            return
        yield _document(line, f"{part.name}, the line at byte {at}", form)
        at += len(line)


def _compressed(file: BinaryIO, part: Part, form: DocumentFormat) -> Iterator[Document]:
    """Sizes here are of the compressed bytes that were read meanwhile."""
    before = 0
    try:
        with gzip.open(file) as lines:
            for number, line in enumerate(lines, start=1):
                position = file.tell()
                yield _document(line, f"{part.name}, line {number}", form)._replace(size=position - before)
                before = position
    except (EOFError, gzip.BadGzipFile) as error:
        yield Document(None, part.stop - before, part.name, f"damaged: {error}")


def _document(content: bytes, where: str, form: DocumentFormat | None = None) -> Document:
    """``content`` as text, or with a ``form`` as a JSON line."""

    def broken(problem: str) -> Document:
        return Document(None, len(content), where, problem)

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
    if form.examples:
        try:
            example = read_example(row, form.prompt_key, form.completion_key)
        except BrokenExample as error:
            return broken(str(error))
        return Document(example.text, len(content), where, example=example)
    if not isinstance(row, dict) or not isinstance(row.get(form.text_key), str):
        there = ", ".join(map(repr, row)) if isinstance(row, dict) else "no object"
        return broken(f"there is no text under the key '{form.text_key}' (there is {there})")
    found: str = row[form.text_key]
    return Document(found, len(content), where)
