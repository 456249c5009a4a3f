"""The memory of a process and of all processes that it started, each byte counted once.

Counted: private memory; memory that processes of the family share, once (their proportional shares); files in memory (``/dev/shm``, memfd) that one of them
holds open, whether mapped or not; and the resident pages of mapped files (libraries), of each file those of the process that has most of them.
Proportional shares alone would not do for files: they fall as strangers map the same library. The cache of files that were only read is not counted."""

import contextlib
import re
import stat
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from machine import HERE

sys.path.insert(0, str(HERE / "peers"))
from clock import family

MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ (\S+) (\d+) *(.*)$")


@dataclass(frozen=True, slots=True)
class Bytes:
    """``anonymous``: private and shared without a file. ``shared_files``: in ``/dev/shm`` and memfd. ``mapped_files``: libraries."""

    anonymous: int
    shared_files: int
    mapped_files: int

    @property
    def total(self) -> int:
        return self.anonymous + self.shared_files + self.mapped_files


def anonymous_bytes(pids: list[int]) -> int:
    """The proportional shares of anonymous memory of the processes."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss_Anon:"):
                    total += int(line.split()[1]) * 1024
    return total


def shared_file_bytes(pids: list[int]) -> int:
    """The allocated bytes of every file in memory that one of the processes holds open."""
    found: dict[tuple[int, int], int] = {}
    memory = Path("/dev/shm").stat().st_dev
    for pid in pids:
        with contextlib.suppress(OSError):
            for opened in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    status = opened.stat()
                    if stat.S_ISREG(status.st_mode) and (status.st_dev == memory or str(opened.readlink()).startswith("/memfd:")):
                        found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def mapped_file_bytes(pids: list[int]) -> int:
    """The resident pages of the mapped files, of each file those of the process that has most of them."""
    most: dict[tuple[str, str], int] = {}
    for pid in pids:
        own: dict[tuple[str, str], int] = {}
        key: tuple[str, str] | None = None
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
                mapping = MAPPING.match(line)
                if mapping is not None:
                    device, inode, path = mapping.groups()
                    key = (device, inode) if inode != "0" and not path.startswith(("/dev/shm", "/memfd:")) else None
                elif key is not None and line.startswith("Rss:"):
                    own[key] = own.get(key, 0) + int(line.split()[1]) * 1024
                elif key is not None and line.startswith("Anonymous:"):
                    own[key] -= int(line.split()[1]) * 1024
        for file, size in own.items():
            most[file] = max(most.get(file, 0), size)
    return sum(most.values())


@dataclass(frozen=True, slots=True)
class ProcessPages:
    """The anonymous memory of one process: its proportional share, its own pages, and those that it has in common with others. ``name``: of its module."""

    name: str
    share: int
    own: int
    common: int


def by_process(pid: int) -> list[ProcessPages]:
    """The anonymous memory of every process of the family of ``pid``, now."""
    processes = []
    for each in family(pid):
        with contextlib.suppress(OSError):
            sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()[1:]}
            words = Path(f"/proc/{each}/cmdline").read_text(errors="replace").split("\0")
            modules = [word for word in words if word.startswith("tandem.") and word != "tandem.runtime.process.child"]
            # Settings of a rank name the module of its calls, and arguments of a shim its role.
            named = re.findall(r"tandem[.]pod[.]\w+_worker", " ".join(words)) + [words[at + 1] for at, word in enumerate(words[:-1]) if word == "--role"]
            name = " ".join([*modules[:1], *named[:1]]) or Path(next((word for word in words if word.endswith(".py")), words[0])).name
            processes.append(ProcessPages(name, sizes["Pss_Anon:"], sizes["Private_Dirty:"], sizes["Shared_Dirty:"]))
    return processes


class PeakMemory:
    """Samples a family inside the ``with`` block; ``peak`` is the sample with the largest sum of anonymous and shared memory, with the mapped files as they
    are at the end. Sampling slows the family down, so what is timed is measured apart."""

    def __init__(self, pid: int, every_s: float = 0.01) -> None:
        self.pid, self.every_s, self.samples = pid, every_s, 0
        self.peak = Bytes(0, 0, 0)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        largest = (0, 0)
        while not self._done.is_set():
            pids = family(self.pid)
            now = (anonymous_bytes(pids), shared_file_bytes(pids))
            largest, self.samples = max(largest, now, key=sum), self.samples + 1
            time.sleep(self.every_s)
        self.peak = Bytes(*largest, mapped_file_bytes(family(self.pid)))

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()


def peak_of(pid: int, work: Callable[[], object]) -> PeakMemory:
    """The peak of the family of ``pid`` while ``work`` runs."""
    with PeakMemory(pid) as memory:
        work()
    return memory
