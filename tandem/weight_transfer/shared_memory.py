"""POSIX shared memory as files: created once by a shim, reused while it lives, and removed with it.

A segment is ``/dev/shm/tandem-POD-PID-NAME`` with the owner's PID. The owner holds a lock on it for its lifetime; the kernel releases the
lock however the owner ends, so that a sweep can tell a dead owner's segment from a live one's, even if two containers share the folder but
not the PID namespace. Imports no torch.
"""

import errno
import fcntl
import logging
import mmap
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.types.errors import RunError
from tandem.weight_transfer.manifest import aligned

logger = logging.getLogger(__name__)

# <linux/mman.h>, Linux 5.14. Python's mmap does not define them yet.
_POPULATE_READ, _POPULATE_WRITE = 22, 23

FOLDER = Path("/dev/shm")
_NAME = re.compile(r"tandem-(?P<pod>[\w.]+)-(?P<pid>\d+)-(?P<name>[\w.-]+)")


class Segment:
    """A mapped segment. ``name``: its file's name; ``memory``: its bytes, shared with every process that has it open."""

    def __init__(self, path: Path, file: int, size_bytes: int, *, owned: bool, writable: bool) -> None:
        self.path, self.name, self.size_bytes, self.owned = path, path.name, size_bytes, owned
        self._file, self._writable = file, writable
        # A reader's mapping is copy-on-write: it sees the writer's changes, and its own changes are not written to the segment.
        self._map = mmap.mmap(file, size_bytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY)
        self.memory = memoryview(self._map)

    @classmethod
    def create(cls, pod_id: str, name: str, size_bytes: int, folder: Path = FOLDER) -> "Segment":
        """Creates a segment, owned by the caller, with every page allocated, so that a full folder raises ``RunError`` here and never
        causes a bus error later."""
        path = folder / f"tandem-{pod_id}-{os.getpid()}-{name}"
        assert _NAME.fullmatch(path.name), f"pod id '{pod_id}' and name '{name}' are not valid in a segment's name"
        size_bytes = max(aligned(size_bytes), mmap.PAGESIZE)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise RunError(f"shared memory {path} cannot be created: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(file, 0, size_bytes)
            return cls(path, file, size_bytes, owned=True, writable=True)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(file)
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
                raise RunError(
                    f"shared memory {folder} is full: segment '{name}' needs {size_bytes / 2**30:.3g} GiB and "
                    f"{_free_bytes(folder) / 2**30:.3g} GiB are free; make {folder} larger or free what is in it"
                ) from None
            raise RunError(f"shared memory {path} cannot be created: {error.strerror or error}") from None

    @classmethod
    def open(cls, name: str, folder: Path = FOLDER, *, writable: bool = False) -> "Segment":
        """Opens another process's segment. Raises ``FileNotFoundError`` if it was removed with its owner, ``RunError`` for other
        failures."""
        path = folder / name
        try:
            file = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise RunError(f"shared memory {path} cannot be opened: {error.strerror}") from None
        return cls(path, file, os.fstat(file).st_size, owned=False, writable=writable)

    def touch(self, runs: Sequence[tuple[int, int]] | None = None) -> None:
        """Maps every page, or those of ``runs`` (offset, bytes), into this process: the first access to a page costs ten times as much as
        later ones."""
        advice = _POPULATE_WRITE if self._writable else _POPULATE_READ
        for start, stop in [(0, len(self._map))] if runs is None else _pages_of(runs):
            populate(self._map, advice, start, min(stop, len(self._map)))

    def close(self) -> None:
        """Unmaps the segment and, for the owner, removes it. Tensors that are views of it keep the mapping alive."""
        if self._file < 0:
            return
        if self.owned:
            self.path.unlink(missing_ok=True)
        os.close(self._file)
        self._file = -1
        try:
            self.memory.release()
            self._map.close()
        except BufferError:
            logger.debug("segment %s is still in use; its mapping is released with the last tensor", self.name)

    def __enter__(self) -> "Segment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class WeightBuffers:
    """The double buffer of a pod's weights: while one segment holds the published version, the next version is written to the other."""

    segments: tuple[Segment, Segment]

    @classmethod
    def create(cls, pod_id: str, size_bytes: int, folder: Path = FOLDER) -> "WeightBuffers":
        """Creates both segments or none, for the owner."""
        first = Segment.create(pod_id, "weights-0", size_bytes, folder)
        try:
            return cls((first, Segment.create(pod_id, "weights-1", size_bytes, folder)))
        except BaseException:
            first.close()
            raise

    @classmethod
    def open(cls, names: tuple[str, str], folder: Path = FOLDER) -> "WeightBuffers":
        """Opens the segments by the owner's names, for the worker that writes."""
        first = Segment.open(names[0], folder, writable=True)
        try:
            return cls((first, Segment.open(names[1], folder, writable=True)))
        except BaseException:
            first.close()
            raise

    @property
    def names(self) -> tuple[str, str]:
        return self.segments[0].name, self.segments[1].name

    @property
    def size_bytes(self) -> int:
        """The size of one buffer."""
        return min(segment.size_bytes for segment in self.segments)

    def other(self, published: str | None) -> Segment:
        """Returns the buffer that does not hold the version published in the segment ``published``."""
        return self.segments[1] if published == self.segments[0].name else self.segments[0]

    def close(self) -> None:
        for segment in self.segments:
            segment.close()


def populate(memory: mmap.mmap, advice: int = _POPULATE_WRITE, start: int = 0, stop: int | None = None) -> None:
    """Touches every page of ``memory`` from ``start`` (a multiple of the page size) to ``stop`` at once."""
    stop = len(memory) if stop is None else stop
    try:
        memory.madvise(advice, start, stop - start)
    except (OSError, ValueError):
        for at in range(start, stop, mmap.PAGESIZE):
            memory[at]


def _pages_of(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the pages of ``runs`` (offset, bytes) as ranges of bytes, with neighbours merged."""
    ranges: list[tuple[int, int]] = []
    for offset, size in sorted(run for run in runs if run[1]):
        start, stop = offset // mmap.PAGESIZE * mmap.PAGESIZE, -(-(offset + size) // mmap.PAGESIZE) * mmap.PAGESIZE
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(stop, ranges[-1][1]))
        else:
            ranges.append((start, stop))
    return ranges


def sweep(pod_id: str | None = None, folder: Path = FOLDER) -> list[str]:
    """Removes segments whose owner is dead, of ``pod_id`` or of any pod; returns their names. A live owner's segments are kept."""
    removed = []
    for path in sorted(folder.glob("tandem-*")):
        match = _NAME.fullmatch(path.name)
        if not match or (pod_id is not None and match["pod"] != pod_id) or _alive(int(match["pid"])):
            continue
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except OSError:
            logger.debug("segment %s is locked: its owner is alive in another PID namespace", path.name)
        finally:
            os.close(file)
    if removed:
        logger.info("removed the shared memory of dead processes: %s", ", ".join(removed))
    return removed


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def check_free(size_bytes: int, folder: Path = FOLDER) -> None:
    """Raises ``RunError`` where ``folder`` has fewer than ``size_bytes`` free, even without the segments of dead owners."""
    if _free_bytes(folder) < size_bytes:
        sweep(folder=folder)
    free = _free_bytes(folder)
    if free < size_bytes:
        raise RunError(
            f"this run needs {size_bytes / 2**20:,.1f} MiB of shared memory for its weights and {folder} has {free / 2**20:,.1f} MiB free; make {folder} "
            "larger (in a container: --shm-size) or free what is in it"
        )


def _free_bytes(folder: Path) -> int:
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize
