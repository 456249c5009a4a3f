"""POSIX shared memory as files: made once by a shim, warm from then on, gone with their owner.

A segment is ``/dev/shm/tandem-POD-PID-NAME``, PID being its owner's. The owner holds a lock on it for as long as it
lives; the kernel drops the lock when the owner ends in whatever way, so a sweep can tell a dead owner's segment from a
live one's, also where two containers share the folder and count their processes apart. Imports no torch.
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

# <linux/mman.h>, Linux 5.14. Python's mmap does not name them yet.
_POPULATE_READ, _POPULATE_WRITE = 22, 23

FOLDER = Path("/dev/shm")
_NAME = re.compile(r"tandem-(?P<pod>[\w.]+)-(?P<pid>\d+)-(?P<name>[\w.-]+)")


class Segment:
    """A mapped segment. ``name`` is its file's name; ``memory`` its bytes, shared with every process that has it
    open."""

    def __init__(self, path: Path, file: int, size_bytes: int, *, owned: bool, writable: bool) -> None:
        self.path, self.name, self.size_bytes, self.owned = path, path.name, size_bytes, owned
        self._file, self._writable = file, writable
        # A reader's mapping is copy-on-write: it sees what the writer writes, and nothing that the reader does reaches
        # it.
        self._map = mmap.mmap(file, size_bytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY)
        self.memory = memoryview(self._map)

    @classmethod
    def create(cls, pod_id: str, name: str, size_bytes: int, folder: Path = FOLDER) -> "Segment":
        """A new segment whose every page is allocated now: a full folder is a ``RunError`` here and never a bus error
        later. The caller owns it."""
        path = folder / f"tandem-{pod_id}-{os.getpid()}-{name}"
        assert _NAME.fullmatch(path.name), f"pod id '{pod_id}' and name '{name}' do not make a segment's name"
        size_bytes = max(aligned(size_bytes), mmap.PAGESIZE)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise RunError(f"shared memory {path} cannot be made: {error.strerror}") from None
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
            raise RunError(f"shared memory {path} cannot be made: {error.strerror or error}") from None

    @classmethod
    def open(cls, name: str, folder: Path = FOLDER, *, writable: bool = False) -> "Segment":
        """Somebody else's segment. Raises ``FileNotFoundError`` where it went with its owner, ``RunError``
        otherwise."""
        path = folder / name
        try:
            file = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise RunError(f"shared memory {path} cannot be opened: {error.strerror}") from None
        return cls(path, file, os.fstat(file).st_size, owned=False, writable=writable)

    def touch(self, runs: Sequence[tuple[int, int]] | None = None) -> None:
        """Map every page, or those of ``runs`` (offset, bytes), into this process now: the first touch of a page costs ten times what
        later ones do."""
        advice = _POPULATE_WRITE if self._writable else _POPULATE_READ
        for start, stop in [(0, len(self._map))] if runs is None else _pages_of(runs):
            populate(self._map, advice, start, min(stop, len(self._map)))

    def close(self) -> None:
        """Unmap it and, for the owner, remove it. Tensors that still look into it keep the mapping until they go."""
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
            logger.debug("segment %s is still looked into; its mapping goes with the last tensor", self.name)

    def __enter__(self) -> "Segment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class WeightBuffers:
    """The double buffer of a pod's weights: while one holds the published version, the next is written to the other."""

    segments: tuple[Segment, Segment]

    @classmethod
    def create(cls, pod_id: str, size_bytes: int, folder: Path = FOLDER) -> "WeightBuffers":
        """For the owner. Both or neither are made."""
        first = Segment.create(pod_id, "weights-0", size_bytes, folder)
        try:
            return cls((first, Segment.create(pod_id, "weights-1", size_bytes, folder)))
        except BaseException:
            first.close()
            raise

    @classmethod
    def open(cls, names: tuple[str, str], folder: Path = FOLDER) -> "WeightBuffers":
        """For the worker that writes, by the names that the owner told it."""
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
        """Of one buffer."""
        return min(segment.size_bytes for segment in self.segments)

    def other(self, published: str | None) -> Segment:
        """The buffer that does not hold what was published in the segment ``published``."""
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
    """The pages of ``runs`` (offset, bytes) as ranges of bytes, neighbours joined."""
    found: list[tuple[int, int]] = []
    for offset, size in sorted(run for run in runs if run[1]):
        start, stop = offset // mmap.PAGESIZE * mmap.PAGESIZE, -(-(offset + size) // mmap.PAGESIZE) * mmap.PAGESIZE
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def sweep(pod_id: str | None = None, folder: Path = FOLDER) -> list[str]:
    """Remove segments whose owner is dead, of ``pod_id`` or of any pod; returns their names. A live owner's stay."""
    removed = []
    for path in sorted(folder.glob("tandem-*")):
        found = _NAME.fullmatch(path.name)
        if not found or (pod_id is not None and found["pod"] != pod_id) or _alive(int(found["pid"])):
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
            logger.debug("segment %s is locked: its owner lives where this process cannot see it", path.name)
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


def _free_bytes(folder: Path) -> int:
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize
