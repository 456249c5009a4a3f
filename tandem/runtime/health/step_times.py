"""Where the time of each rank goes: its own work by phase and its waits by group, in a small file of shared memory. Imports no torch.

In a synchronous run all ranks have the same time for a step. What tells them apart is how much of it is their own work: the time of a phase without the waits
in it. A rank writes its record at the end of each step; who reads it needs no answer of the rank.
"""

import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tandem.runtime.mapped_file import mapped_file

_HEAD = struct.Struct("<qq")
_SLOT = 4096
_TRIES = 8
_LINKS_S = 1.0
"""Seconds between two looks at the connections of a rank."""
MOST_LINKS = 48
IN_STEP = frozenset({"data", "train", "forward", "backward", "reduce", "optimizer", "inference"})
"""The phases of which every step has as many on each rank. Checkpoints and evaluations come now and then, and ranks share them unequally."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """The sums of ``rank`` since the start of its process ``pid``, at the end of a step.

    Args:
        steps: finished.
        own_s: seconds of its own work, by phase.
        waited_s: seconds that it waited in collectives, by the group.
        round_trip_s: of its connections now, by the addresses of other machines, the shortest of several.
        node, host: the machine, and its address for others, where the reader knows them.
    """

    rank: int
    pid: int = 0
    steps: int = 0
    own_s: Mapping[str, float] = field(default_factory=dict)
    waited_s: Mapping[str, float] = field(default_factory=dict)
    round_trip_s: Mapping[str, float] = field(default_factory=dict)
    node: str = ""
    host: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "RankTimes":
        return cls(**content)

    def on(self, node: str, host: str) -> "RankTimes":
        """Returns these of a rank on ``node``, which others reach at ``host``."""
        return replace(self, node=node, host=host)


class StepClock:
    """Divides the time of ``rank``. ``write``: takes the record. ``round_trips``: returns those of this process. Thread-safe."""

    def __init__(
        self, rank: int, write: Callable[[bytes], None], round_trips: Callable[[], Mapping[str, float]] = dict, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank, self._write, self._round_trips, self._clock = rank, write, round_trips, clock
        self._lock = threading.Lock()
        self._phase, self._step, self._since_s, self._waits_s = "", -1, clock(), 0.0
        self._steps = 0
        self._own, self._waited = dict[str, float](), dict[str, float]()
        self._links, self._links_s = dict[str, float](), 0.0

    def enters(self, phase: str, step: int) -> None:
        """The rank enters ``phase`` of ``step``."""
        with self._lock:
            self._end()
            if step != self._step:
                if self._step >= 0:
                    self._steps += 1
                    self._record()
                self._step = step
            self._phase = phase

    def rests(self) -> None:
        """The rank waits for its next call, which is no work of a phase."""
        with self._lock:
            self._end()
            self._phase = ""
            self._record()

    def waited(self, group: str, seconds: float) -> None:
        """The rank has waited in a collective of ``group``."""
        with self._lock:
            self._waits_s += seconds
            if self._phase in IN_STEP:
                self._waited[group] = self._waited.get(group, 0.0) + seconds

    def _end(self) -> None:
        now = self._clock()
        if self._phase in IN_STEP:
            self._own[self._phase] = self._own.get(self._phase, 0.0) + max(0.0, now - self._since_s - self._waits_s)
        self._since_s, self._waits_s = now, 0.0

    def _record(self) -> None:
        if (now := self._clock()) - self._links_s >= _LINKS_S:
            slowest = sorted(self._round_trips().items(), key=lambda item: -item[1])[:MOST_LINKS]
            self._links, self._links_s = dict(slowest), now
        self._write(json.dumps(RankTimes(self._rank, os.getpid(), self._steps, self._own, self._waited, self._links).to_json()).encode())


class StepTimesTable:
    """The records of ``ranks`` ranks in the file ``path``, which is created if it does not exist."""

    def __init__(self, path: Path, ranks: int) -> None:
        self.ranks = ranks
        self._memory: mmap.mmap | bytes = mapped_file(path, ranks * _SLOT)

    def write(self, rank: int, record: bytes) -> None:
        """Writes the ``record`` of ``rank``, which must be this process. One that is too long is left out."""
        assert isinstance(self._memory, mmap.mmap), "the table is closed"
        if len(record) > _SLOT - _HEAD.size:
            return
        at = rank * _SLOT
        number, _ = _HEAD.unpack_from(self._memory, at)
        # An odd number: the record is being written.
        _HEAD.pack_into(self._memory, at, number | 1, len(record))
        self._memory[at + _HEAD.size : at + _HEAD.size + len(record)] = record
        _HEAD.pack_into(self._memory, at, (number | 1) + 1, len(record))

    def read(self) -> list[RankTimes]:
        """Returns the record of every rank that has one, by rank."""
        return _read(self._memory, self.ranks)

    def close(self) -> None:
        """Releases the file. What it had last can still be read."""
        self._memory = bytes(self._memory)


def step_times_path(heartbeats: Path) -> Path:
    """Returns the file of the records of the ranks whose heartbeats are in the file ``heartbeats``."""
    return heartbeats.with_name("step_times")


def read_step_times(path: Path) -> list[RankTimes]:
    """Returns the records in the file ``path`` of a ``StepTimesTable``; none if the file does not exist."""
    try:
        memory = path.read_bytes()
    except OSError:
        return []
    return _read(memory, len(memory) // _SLOT)


def _read(memory: "mmap.mmap | bytes", ranks: int) -> list[RankTimes]:
    found = []
    for at in range(0, ranks * _SLOT, _SLOT):
        for _ in range(_TRIES):
            number, length = _HEAD.unpack_from(memory, at)
            record = bytes(memory[at + _HEAD.size : at + _HEAD.size + length])
            if number % 2 == 0 and _HEAD.unpack_from(memory, at) == (number, length):
                if number:
                    found.append(RankTimes.from_json(json.loads(record)))
                break
    return found
