"""Flips single bits in the files of a run that was killed, and finds out whether ``tandem verify`` notices each, or it changes nothing.

    python benchmarks/flips.py [--flips 1000] [--seed 0]

The run is ``tests/pod/tiny.yaml``, whose controller is killed in step 5: with two checkpoints, the stage before it, and a journal that is
still in its write-ahead log. A flip that is not noticed must lie where SQLite reads nothing: all rows of the journal, read with the
flip in place, are those without it. The script fails otherwise.
"""

import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from machine import ROOT, machine, write_report
from options import parser as shared_parser

from tandem.jobs.verify.verify_run import parts_of
from tandem.types import UserError

UNREAD = ("logs/",
    "entropies.sqlite",
    "metrics.sqlite",
    "lock",
    "report.html",
    "journal.sqlite-shm",
    "pod/",
    "traces/",
    "ranks/",
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


def all_that_is_read(path: Path) -> tuple[str, ...]:
    """Returns every row and the schema of an SQLite file."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return (*connection.iterdump(), str(connection.execute("PRAGMA user_version").fetchone()))


def check_changes_nothing(run: Path, flips: list[Flip]) -> None:
    """Raises ``AssertionError`` for a flip that changes what is read."""
    before = {name: all_that_is_read(run / name) for name in files_of(run) if name.endswith("journal.sqlite")}
    for flip in flips:
        assert flip.file in before, flip
        with flipped(run, flip):
            assert all_that_is_read(run / flip.file) == before[flip.file], flip


def killed_run(parent: Path) -> Path:
    """Returns the folder of a run that was killed in step 5."""
    pod = ROOT / "tests" / "pod"
    shutil.copy(pod / "rewards.py", parent)
    arguments = ["train", str(pod / "tiny.yaml"), f"--run.directory={parent}", "--run.name=run", "--fault", "controller:before:train:5"]
    done = subprocess.run([sys.executable, "-m", "tandem.cli.main", *arguments], cwd=parent, stdout=subprocess.DEVNULL)
    assert done.returncode == -9, done
    return parent / "run"


def kind_of(file: str) -> str:
    """Returns the row of the table that ``file`` belongs to."""
    name = Path(file).name
    if "checkpoints/" in file:
        return "checkpoints: " + (name if not name.startswith("rank-") else f"rank{Path(name).suffix}")
    return name if name.startswith(("journal", "metrics", "config.yaml")) else f"models: {name}"


def main() -> None:
    parser = shared_parser(__doc__ or "")
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    described = machine()
    with tempfile.TemporaryDirectory() as parent:
        run = killed_run(Path(parent))
        assert found_in(run) == []
        outcome = try_flips(run, random_flips(run, options.flips, options.seed))
        check_changes_nothing(run, outcome.unnoticed)
        names = files_of(run)
    noticed, silent = Counter[str](), Counter[str]()
    for file, count in outcome.noticed.items():
        noticed[kind_of(file)] += count
    for flip in outcome.unnoticed:
        silent[kind_of(flip.file)] += 1
    kinds = sorted({kind_of(name) for name in names})
    lines = ["| file | flips | noticed | change nothing that is read | unnoticed |", "|---|---|---|---|---|"]
    lines += [f"| `{kind}` | {noticed[kind] + silent[kind]} | {noticed[kind]} | {silent[kind]} | 0 |" for kind in kinds]
    lines += [f"| all {len(names)} files | {options.flips} | {noticed.total()} | {silent.total()} | 0 |"]
    text = "\n".join(["# Flipped bits", "", described, "", f"Seed {options.seed}; a file at random, then one of its bits.", "", *lines])
    print(text)
    print(f"wrote {write_report('flips', text, options.out)}")


if __name__ == "__main__":
    main()
