"""What every rank is doing now, in one small file of shared memory.

A rank writes its own record with plain stores to memory, which cost next to nothing; the supervisor can read the record of a rank that is
stuck in C, stopped, or dead. A record that is read while it is written may have torn texts, but never a torn ``beat_s``, from which deadlines
are computed (one aligned number). Seconds are of the machine's monotonic clock, which all processes share and which cannot be set, so a
change of the wall clock neither causes nor hides a hang.
"""

import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tandem.runtime.health.step_times import StepClock
from tandem.runtime.mapped_file import mapped_file

_RECORD = struct.Struct("<ddqqqqd48s16s64s")
_SIZE = 256


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank's record.

    Args:
        beat_s: monotonic seconds of its last progress, 0 before the first.
        step, phase: where it is.
        collective, group, since_s: the collective that it is blocked in, its group, and since when (empty: none).
        collectives, sent_bytes, waited_s: collectives begun, bytes sent in them and seconds waited for them, since the rank's start.
        pid: its process.
    """

    rank: int
    pid: int
    beat_s: float
    step: int
    phase: str
    collective: str
    group: str
    since_s: float
    collectives: int
    sent_bytes: int
    waited_s: float

    def describe(self, now_s: float) -> str:
        """Returns a line such as ``rank 1 waits in the collective 'gradients of layer 3' ('tokens') in 'train' of step 4 for 12.0 s``."""
        if self.beat_s == 0:
            return f"rank {self.rank} has not begun"
        where = f"in '{self.phase}' of step {self.step}" if self.phase else "in its start"
        if self.collective:
            return f"rank {self.rank} waits in the collective '{self.collective}' ('{self.group}') {where} for {now_s - self.since_s:.1f} s"
        return f"rank {self.rank} has done nothing {where} for {now_s - self.beat_s:.1f} s"


class HeartbeatTable:
    """The records of ``ranks`` ranks in the file ``path``, which is created if it does not exist."""

    def __init__(self, path: Path, ranks: int) -> None:
        self.ranks = ranks
        self._memory: mmap.mmap | bytes = mapped_file(path, ranks * _SIZE)

    def states(self) -> list[RankState]:
        """Returns every rank's record, by rank."""
        return _states(self._memory, self.ranks)

    def writer(self, rank: int) -> "Heartbeat":
        """Returns the writer of the record of ``rank``, which must be this process."""
        assert isinstance(self._memory, mmap.mmap), "the table is closed"
        return Heartbeat(self._memory, rank)

    def clear(self) -> None:
        """Clears all records, before ranks are started."""
        assert isinstance(self._memory, mmap.mmap), "the table is closed"
        self._memory[:] = bytes(len(self._memory))

    def close(self) -> None:
        """Releases the file. What it had last can still be read, by a thread that looks at the ranks meanwhile."""
        self._memory = bytes(self._memory)


def read_states(path: Path) -> list[RankState]:
    """Returns the records in the file ``path`` of a ``HeartbeatTable``, by rank; none if the file does not exist."""
    try:
        memory = path.read_bytes()
    except OSError:
        return []
    return _states(memory, len(memory) // _SIZE)


def _states(memory: "mmap.mmap | bytes", ranks: int) -> list[RankState]:
    states = []
    for rank in range(ranks):
        values = _RECORD.unpack_from(memory, rank * _SIZE)
        beat_s, since_s, pid, step, collectives, sent, waited, *texts = values
        phase, group, collective = (text.split(b"\0", 1)[0].decode("utf-8", "replace") for text in texts)
        states.append(RankState(rank, pid, beat_s, step, phase, collective, group, since_s, collectives, sent, waited))
    return states


class Heartbeat:
    """Writes one rank's record: a ``Traffic`` of its communicators. ``clock``: divides its time by phase, for who compares ranks."""

    def __init__(self, memory: mmap.mmap, rank: int) -> None:
        self._memory, self._at = memory, rank * _SIZE
        self.clock: StepClock | None = None
        self._lock = threading.Lock()
        self.step, self.phase = 0, ""
        self.collectives, self.sent_bytes, self.waited_s = 0, 0, 0.0
        self._collective, self._group, self._since = "", "", 0.0
        self._write()

    def phase_is(self, phase: str, step: int) -> None:
        """Records that this rank enters ``phase`` of ``step``."""
        self.phase, self.step = phase, step
        self._write()
        if self.clock is not None:
            self.clock.enters(phase, step)

    def rests(self) -> None:
        """Records that this rank has ended a call."""
        if self.clock is not None:
            self.clock.rests()

    def beat(self) -> None:
        """Records progress of this rank."""
        self._write()

    def started(self, group: str, name: str, sent_bytes: int) -> None:
        self.collectives += 1
        self.sent_bytes += sent_bytes

    def waits(self, group: str, name: str) -> None:
        self._collective, self._group, self._since = name, group, time.monotonic()
        self._write()

    def waited(self, seconds: float) -> None:
        self.waited_s += seconds
        if self.clock is not None:
            self.clock.waited(self._group, seconds)
        self._collective = self._group = ""
        self._write()

    def _write(self) -> None:
        with self._lock:
            _RECORD.pack_into(
                self._memory, self._at, time.monotonic(), self._since, os.getpid(), self.step, self.collectives, self.sent_bytes,
                self.waited_s, self.phase.encode()[:47], self._group.encode()[:15], self._collective.encode()[:63],
            )  # fmt: skip


def newest_ranks(directory: Path) -> list[RankState]:
    """Returns what the trainer's ranks of the run in ``directory`` do now, for readers in another process. Empty where no rank has begun: a run on data in one
    process has none."""
    tables = [*directory.glob("ranks/*/heartbeats"), *directory.glob("pod/trainer-*/heartbeats")]
    return [state for state in read_states(max(tables, key=_made)) if state.pid] if tables else []


def _made(path: Path) -> float:
    try:
        return path.parent.stat().st_mtime
    except OSError:
        return 0.0
