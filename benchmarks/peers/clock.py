"""What a step costs: wall seconds, and CPU seconds of this process, its threads and its children. Standard library only, so
that every side of a benchmark reads the same clock."""

import contextlib
import os
import time
from pathlib import Path


def family(pid: int) -> list[int]:
    """``pid`` and the processes that it started and that still live."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                found += family(int(child))
    return found


def cpu_seconds() -> float:
    """CPU time of this process, all its threads and its living children since they began. On Linux the kernel's clock of
    each process is read, which counts nanoseconds; elsewhere the children are left out."""
    if not Path("/proc/self/task").exists():
        return time.process_time()
    total = time.process_time()
    for pid in family(os.getpid())[1:]:
        with contextlib.suppress(OSError):
            total += time.clock_gettime((~pid << 3) | 2)  # the clock id of another process, as clock_getcpuclockid gives it
    return total


class Stopwatch:
    """``wall_s`` and ``cpu_s`` between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self.began = (0.0, 0.0)
        self.wall_s = self.cpu_s = 0.0

    def start(self) -> None:
        self.began = (time.perf_counter(), cpu_seconds())

    def stop(self) -> dict[str, float]:
        self.wall_s, self.cpu_s = time.perf_counter() - self.began[0], cpu_seconds() - self.began[1]
        return {"wall_s": self.wall_s, "cpu_s": self.cpu_s}
