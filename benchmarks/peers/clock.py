"""What a step costs: wall seconds, and CPU seconds of this process, its threads and its children. Standard library only, so
that every side of a benchmark reads the same clock."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path


def family(pid: int) -> list[int]:
    """``pid`` and the processes that it started and that still live."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                found += family(int(child))
    return found


def cpu_of(pids: Sequence[int]) -> float:
    """CPU seconds of other processes since they began, by the kernel's clock of each, which counts nanoseconds."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += time.clock_gettime((~pid << 3) | 2)  # the clock id of another process, as clock_getcpuclockid gives it
    return total


def children() -> list[int]:
    """The living processes that this one has started, and theirs; none without Linux."""
    return family(os.getpid())[1:] if Path("/proc/self/task").exists() else []


def cpu_seconds() -> float:
    """CPU time of this process, all its threads and its living children since they began; without Linux the children are left out."""
    return time.process_time() + cpu_of(children())


class Stopwatch:
    """``wall_s`` and ``cpu_s`` between ``start`` and ``stop``, of this process and its children. Looking for the children takes milliseconds where they have
    many threads, and is no part of what is measured."""

    def __init__(self) -> None:
        self.began = (0.0, 0.0)
        self.children: Sequence[int] = ()
        self.wall_s = self.cpu_s = 0.0

    def start(self) -> None:
        self.children = children()
        self.began = self._read()

    def stop(self) -> dict[str, float]:
        wall, cpu = self._read()
        started_since = [pid for pid in children() if pid not in self.children]
        self.wall_s, self.cpu_s = wall - self.began[0], cpu + cpu_of(started_since) - self.began[1]
        return {"wall_s": self.wall_s, "cpu_s": self.cpu_s}

    def _read(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time() + cpu_of(self.children)


class PhaseClock:
    """CPU and wall seconds of each phase of a step. Between two steps nothing counts. ``children``: processes whose CPU seconds count for the phase that
    is under way; ``judges``: those whose CPU seconds are ``rewards``, whatever the phase."""

    def __init__(self) -> None:
        self.phase = ""
        self.children: Sequence[int] = ()
        self.judges: Sequence[int] = ()
        self.cpu_s: dict[str, float] = {}
        self.wall_s: dict[str, float] = {}
        self._last = (0.0, 0.0, 0.0)

    def _read(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time() + cpu_of(self.children), cpu_of(self.judges)

    def begin(self, phase: str) -> None:
        """Begins a step in ``phase``."""
        self.phase, self.cpu_s, self.wall_s, self._last = phase, {}, {}, self._read()

    def enter(self, phase: str) -> None:
        """Ends the phase that is under way, and begins ``phase``."""
        now = self._read()
        wall, cpu, judged = (value - before for value, before in zip(now, self._last, strict=True))
        self.wall_s[self.phase] = self.wall_s.get(self.phase, 0.0) + wall
        self.cpu_s[self.phase] = self.cpu_s.get(self.phase, 0.0) + cpu
        if self.judges:
            self.cpu_s["rewards"] = self.cpu_s.get("rewards", 0.0) + judged
        self.phase, self._last = phase, now

    @contextlib.contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Inside, the step is in ``phase``; afterwards in the one before."""
        outer = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer)

    def end(self) -> dict[str, dict[str, float]]:
        """Ends the step; the seconds of its phases."""
        self.enter("")
        return {"phase_cpu_s": self.cpu_s, "phase_wall_s": self.wall_s}
