"""Digests of the tensors of a step, in the order in which they were computed: one file for each process, one line for each tensor. Imports no torch."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

FOLDER = "tensors"
"""The folder of a run's directory that the digests are written to, if it is there."""
COMPLETE = "complete"
"""The file that a replay makes at the end of its record."""
Stage = Literal["rollout", "rewards", "train"]
STAGES: tuple[Stage, ...] = ("rollout", "rewards", "train")


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """``name`` is unique in a ``stage`` of a ``step``. ``norm``: the Euclidean norm of the values, in float64, for a person."""

    step: int
    stage: Stage
    name: str
    digest: str
    norm: float


class TensorDigests:
    """Appends to ``path``. A name that comes again in the same step gets a number."""

    def __init__(self, path: Path) -> None:
        self._path, self._seen = path, dict[tuple[int, str, str], int]()

    def add(self, step: int, stage: Stage, name: str, digest: str, norm: float) -> None:
        key = (step, stage, name)
        self._seen[key] = number = self._seen.get(key, 0) + 1
        line = TensorDigest(step, stage, name if number == 1 else f"{name}, pass {number}", digest, norm)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(line)) + "\n")


@dataclass(frozen=True, slots=True)
class Compared:
    """``equal`` of ``count`` tensors that both have; ``first``: the first one that differs, here and there, with its file; ``unmatched``: tensors that only
    one of them has."""

    count: int
    equal: int
    first: tuple[str, TensorDigest, TensorDigest] | None
    unmatched: int


def compare_digests(here: Path, there: Path) -> Compared:
    """Compares the files of two folders by step, stage and name. The first tensor is that of the earliest step and stage and, within a stage, of the earliest
    place in its file."""
    count = equal = unmatched = 0
    found: list[tuple[tuple[int, int, int, str], str, TensorDigest, TensorDigest]] = []
    for name in sorted({path.name for folder in (here, there) for path in folder.glob("*.jsonl")}):
        ours, theirs = list(_read(here / name)), {_key(line): line for line in _read(there / name)}
        unmatched += len(theirs.keys() ^ {_key(line) for line in ours})
        for place, line in enumerate(ours):
            other = theirs.get(_key(line))
            if other is None:
                continue
            count += 1
            equal += line.digest == other.digest
            if line.digest != other.digest:
                found.append(((line.step, STAGES.index(line.stage), place, name), name.removesuffix(".jsonl"), line, other))
    first = min(found, key=lambda one: one[0])[1:] if found else None
    return Compared(count, equal, first, unmatched)


def _key(line: TensorDigest) -> tuple[int, str, str]:
    return line.step, line.stage, line.name


def _read(path: Path) -> Iterator[TensorDigest]:
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield TensorDigest(**json.loads(line))
