"""Flips single bits in the files of a run that was killed, and finds out whether each is noticed or changes nothing."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tandem.jobs.verify.verify_run import parts_of
from tandem.types import UserError

UNREAD = (
    "logs/",
    "lock",
    "report.html",
    "journal.sqlite-shm",
    "pod/",
    "traces/",
    "sft/logs/",
    "sft/lock",
    "sft/report.html",
    "sft/journal.sqlite-shm",
)
"""Files that no result depends on: text for people, locks, and what the processes of a pod share while they live."""


class Flip(NamedTuple):
    """Bit ``bit`` of byte ``place`` of ``file``, a path relative to the run's folder."""

    file: str
    place: int
    bit: int


def files_of(run: Path) -> list[str]:
    """Returns the files of ``run`` that are not empty and that results may depend on."""
    names = (path.relative_to(run).as_posix() for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size)
    return [name for name in names if not name.startswith(UNREAD)]


def random_flips(run: Path, count: int, seed: int) -> list[Flip]:
    """Returns ``count`` flips: a file at random, then a byte of it, so that small files are struck as often as large ones."""
    draw, files = random.Random(seed), files_of(run)
    chosen = [draw.choice(files) for _ in range(count)]
    return [Flip(file, draw.randrange((run / file).stat().st_size), draw.randrange(8)) for file in chosen]


@contextmanager
def flipped(run: Path, flip: Flip) -> Iterator[None]:
    path = run / flip.file
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(flip.place)
        before = file.read(1)
        file.seek(flip.place)
        file.write(bytes([before[0] ^ (1 << flip.bit)]))
    try:
        yield
    finally:
        with path.open("r+b") as file:
            file.seek(flip.place)
            file.write(before)
        assert path.stat().st_size == times.st_size


def found_in(run: Path) -> list[str]:
    """Returns what ``tandem verify`` says is damaged."""
    try:
        return [finding.line() for part in parts_of(run) for finding in part.verify()]
    except UserError as error:
        return [str(error)]


class Outcome(NamedTuple):
    """``noticed`` by file; ``unnoticed``: the flips that no verification found."""

    noticed: Counter[str]
    unnoticed: list[Flip]


def try_flips(run: Path, flips: list[Flip]) -> Outcome:
    noticed, unnoticed = Counter[str](), []
    for flip in flips:
        with flipped(run, flip):
            lines = found_in(run)
        assert all("\n" not in line for line in lines), lines
        if lines:
            noticed[flip.file] += 1
        else:
            unnoticed.append(flip)
    return Outcome(noticed, unnoticed)


def with_flip(run: Path, flip: Flip, target: Path) -> Path:
    """Copies ``run`` to ``target`` with the flip in it."""
    shutil.copytree(run, target)
    with (target / flip.file).open("r+b") as file:
        file.seek(flip.place)
        before = file.read(1)
        file.seek(flip.place)
        file.write(bytes([before[0] ^ (1 << flip.bit)]))
    return target


def described(outcome: Outcome) -> str:
    return json.dumps({"noticed": dict(outcome.noticed), "unnoticed": [flip._asdict() for flip in outcome.unnoticed]}, indent=1)
