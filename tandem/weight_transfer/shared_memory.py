"""Shared memory without a name: created once by a shim, reused while it lives, and freed by the kernel with its last user, however that ends.

A segment is an unnamed file of ``/dev/shm`` (``O_TMPFILE``). Other processes of the user open it by the descriptor of its owner, which its name
has: ``tandem-POD-PID-NAME-DESCRIPTOR-INODE``. The inode tells it from what has the descriptor's number later. Imports no torch.

Behind its bytes a segment has a label: which weights it holds. A writer takes the label away before it changes the first byte and puts the new one
there after the last, so that a reader of this process or of another pod that finds the same label before and after knows whose bytes it read.
"""

import ctypes
import errno
import functools
import logging
import mmap
import os
import re
import struct
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from tandem.runtime.rpc.calls import PeerDied
from tandem.storage.disk_space import free_bytes, reserve
from tandem.types.errors import RunError
from tandem.types.sample import WeightVersion
from tandem.types.weights import WeightManifest
from tandem.weight_transfer.manifest import aligned

logger = logging.getLogger(__name__)

# <linux/mman.h>, Linux 5.14 and 6.1. Python's mmap does not define them yet.
_POPULATE_READ, _POPULATE_WRITE, _COLLAPSE = 22, 23, 25
_MAP_FIXED = 0x10

HUGE_PAGE_BYTES = 2 * 2**20
SMALL_BYTES = 8 * 2**20
"""Weights in pages of 4 KiB of which a processor keeps the addresses of all; with more, products of few rows wait for them (measured: 4 to 20 % longer)."""

FOLDER = Path("/dev/shm")
_NAME = re.compile(r"tandem-(?P<pod>[\w.]+)-(?P<pid>\d+)-(?P<name>[\w.-]+)-(?P<descriptor>\d+)-(?P<inode>\d+)")


_LABEL = struct.Struct("<4sIqq16s")
_LABEL_MAGIC, _DIGEST = b"TDMW", struct.Struct("<Q")
LABEL_BYTES = _LABEL.size + _DIGEST.size
_NO_LABEL = bytes(LABEL_BYTES)


class Contents(NamedTuple):
    """Which weights a segment holds: their version and the digest of their manifest."""

    version: WeightVersion
    digest: str


def contents_of(manifest: WeightManifest) -> Contents:
    return Contents(manifest.version, manifest.digest)


def encode_label(contents: Contents) -> bytes:
    """Returns the label of a segment that holds ``contents``."""
    fields = _LABEL.pack(_LABEL_MAGIC, 1, *contents.version, bytes.fromhex(contents.digest))
    return fields + _DIGEST.pack(xxhash.xxh3_64_intdigest(fields))


def decode_label(label: bytes) -> Contents | None:
    """Returns what a segment with ``label`` holds; ``None`` while it is written, and where the label was read while it changed."""
    fields, (digest,) = label[: _LABEL.size], _DIGEST.unpack_from(label, _LABEL.size)
    magic, layout, incarnation, step, manifest = _LABEL.unpack(fields)
    if (magic, layout) != (_LABEL_MAGIC, 1) or xxhash.xxh3_64_intdigest(fields) != digest:
        return None
    return Contents(WeightVersion(incarnation, step), manifest.hex())


class Segment:
    """A mapped segment. ``name``: by which ``open`` finds it; ``memory``: its bytes, shared with every process that has it open."""

    def __init__(self, name: str, file: int, size_bytes: int, *, writable: bool) -> None:
        self.name, self.size_bytes = name, size_bytes
        self._file, self._writable = file, writable
        self._map = _mapped(file, file_bytes(size_bytes), writable=writable)
        self.memory = self._map[:size_bytes]
        self._collapsing: threading.Thread | None = None

    @classmethod
    def create(cls, pod_id: str, name: str, size_bytes: int, folder: Path = FOLDER, *, in_huge_pages: bool = True) -> "Segment":
        """Creates a segment that lives until the caller closes it or ends, with every page allocated, so that a full folder raises ``RunError``
        here and never causes a bus error later. ``in_huge_pages``: it is moved to them if it is large, which pays if it is read often."""
        size_bytes = _pages(max(aligned(size_bytes), 1))
        try:
            file = os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600)
        except OSError as error:
            raise RunError(f"shared memory in {folder} cannot be created: {error.strerror}") from None
        try:
            reserve(file, file_bytes(size_bytes))
            label = f"tandem-{pod_id}-{os.getpid()}-{name}-{file}-{os.fstat(file).st_ino}"
            assert _NAME.fullmatch(label), f"pod id '{pod_id}' and name '{name}' are not valid in a segment's name"
            made = cls(label, file, size_bytes, writable=True)
            if in_huge_pages and size_bytes > SMALL_BYTES and has_huge_pages(folder):
                made._begin_to_collapse()
            return made
        except OSError as error:
            os.close(file)
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM):
                raise RunError(
                    f"shared memory {folder} is full: segment '{name}' needs {size_bytes / 2**30:.3g} GiB and "
                    f"{free_bytes(folder) / 2**30:.3g} GiB are free; make {folder} larger or free what is in it"
                ) from None
            raise RunError(f"shared memory in {folder} cannot be created: {error.strerror or error}") from None

    @classmethod
    def open(cls, name: str, *, writable: bool = False) -> "Segment":
        """Opens another process's segment. Raises ``FileNotFoundError`` if it has ended with its owner, ``RunError`` for other failures."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise FileNotFoundError(f"'{name}' is not the name of a segment")
        path = Path(f"/proc/{match['pid']}/fd/{match['descriptor']}")
        try:
            # Before it is opened: the number may be that of a pipe now, which would block.
            if path.stat().st_ino != int(match["inode"]):
                raise FileNotFoundError(f"segment {name} has ended with its owner")
            file = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        except (FileNotFoundError, ProcessLookupError):
            raise FileNotFoundError(f"segment {name} has ended with its owner") from None
        except OSError as error:
            raise RunError(f"shared memory {name} cannot be opened: {error.strerror}") from None
        return cls(name, file, os.fstat(file).st_size - mmap.PAGESIZE, writable=writable)

    def _begin_to_collapse(self) -> None:
        """Moves the segment to huge pages, as weights in a process's own memory are on, in a thread: it takes seconds for a gigabyte, and may happen while
        others use it."""

        def collapse() -> None:
            for at in range(0, self.size_bytes - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
                if self._file < 0 or not advise(self._map, _COLLAPSE, at, at + HUGE_PAGE_BYTES):
                    return

        self._collapsing = threading.Thread(target=collapse, name=f"huge pages of {self.name}", daemon=True)
        self._collapsing.start()

    def fileno(self) -> int:
        """Returns the descriptor of the segment's file, whose first ``size_bytes`` are ``memory``."""
        return self._file

    @property
    def label(self) -> memoryview:
        """The bytes of the segment's label, valid also when the segment was closed."""
        return self._map[self.size_bytes : self.size_bytes + LABEL_BYTES]

    @property
    def note(self) -> memoryview:
        """The rest of the label's page, for what is said of a version while it is written (``announcement``)."""
        return self._map[self.size_bytes + LABEL_BYTES : self.size_bytes + mmap.PAGESIZE]

    @property
    def contents(self) -> Contents | None:
        """Which weights the segment holds now; ``None``: none, or some are being written."""
        return decode_label(bytes(self.label))

    @contents.setter
    def contents(self, contents: Contents | None) -> None:
        """Called by the one that directs the writers: with ``None`` before any of them writes, and with the contents after all have written."""
        self._map[self.size_bytes : self.size_bytes + LABEL_BYTES] = _NO_LABEL if contents is None else encode_label(contents)

    def touch(self, runs: Sequence[tuple[int, int]] | None = None) -> None:
        """Maps every page, or those of ``runs`` (offset, bytes), into this process: the first access to a page costs ten times as much as
        later ones."""
        advice = _POPULATE_WRITE if self._writable else _POPULATE_READ
        for start, stop in [(0, len(self._map))] if runs is None else _pages_of(runs):
            if not advise(self._map, advice, start, min(stop, len(self._map))):
                for at in range(start, min(stop, len(self._map)), mmap.PAGESIZE):
                    self._map[at]

    def close(self) -> None:
        """Unmaps the segment; one that its owner has closed cannot be opened any more. Tensors that are views of it keep the mapping alive."""
        if self._file < 0:
            return
        file, self._file = self._file, -1
        if self._collapsing is not None:
            self._collapsing.join()
        os.close(file)
        self.memory = self._map = memoryview(bytearray())

    def __enter__(self) -> "Segment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OpenSegments:
    """The segments of published weights that a reader has mapped, kept between versions."""

    def __init__(self) -> None:
        self._segments: dict[str, Segment] = {}

    def of(self, manifest: WeightManifest, runs: Sequence[tuple[str, int, int]] | None = None) -> dict[str, Segment]:
        """Returns the segments of ``runs`` (segment, offset, bytes; ``None``: all of ``manifest``) by name, mapped. Raises ``PeerDied`` if one was removed
        with the trainer's shim, ``RunError`` if a run is outside its segment."""
        if runs is None:
            runs = [(entry.segment, entry.offset_bytes, entry.size_bytes) for entry in manifest.tensors]
        names = {name for name, _, _ in runs}
        owners = {name.rsplit("-weights-", 1)[0] for name in names}
        for name in list(self._segments):
            # Keeps the other buffer of the same owner, which is used next, and closes those of a replaced owner.
            if name.rsplit("-weights-", 1)[0] not in owners:
                self._segments.pop(name).close()
        for name in names - self._segments.keys():
            try:
                segment = Segment.open(name)
            except FileNotFoundError:
                text = f"the trainer's shim has ended: its shared memory {name} was removed before it was read"
                raise PeerDied("trainer", "update_weight", text) from None
            self._segments[name] = segment
            segment.touch([(offset, size) for other, offset, size in runs if other == name and offset + size <= segment.size_bytes])
        for name, offset, size in runs:
            if offset + size > self._segments[name].size_bytes:
                version = manifest.version
                raise RunError(f"weights of step {version.step} (incarnation {version.incarnation}) are outside their segment {name}")
        return {name: self._segments[name] for name in names}

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()


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
    def open(cls, names: tuple[str, str]) -> "WeightBuffers":
        """Opens the segments by the owner's names, for the worker that writes."""
        first = Segment.open(names[0], writable=True)
        try:
            return cls((first, Segment.open(names[1], writable=True)))
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


def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


_C = _libc()


def _mapped(file: int, size_bytes: int, *, writable: bool) -> memoryview:
    """Maps ``size_bytes`` of ``file`` at an address at which huge pages can begin. A reader's mapping is copy-on-write: it sees the writer's changes, and
    its own changes are not written to the file. It is unmapped with the last view of it. Raises ``OSError``."""
    reserved = _map(0, size_bytes + HUGE_PAGE_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    at = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    kind = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE
    try:
        _map(at, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, kind | _MAP_FIXED, file)
    except OSError:
        _C.munmap(reserved, size_bytes + HUGE_PAGE_BYTES)
        raise
    # Both sizes are multiples of the page size.
    for start, stop in ((reserved, at), (at + size_bytes, reserved + size_bytes + HUGE_PAGE_BYTES)):
        if start < stop:
            _C.munmap(start, stop - start)
    # A type of its own, because only such an array can be watched for its end.
    kind_of_array: Any = type("Mapping", (ctypes.c_char * size_bytes,), {})
    array = kind_of_array.from_address(at)
    weakref.finalize(array, _C.munmap, at, size_bytes).atexit = False
    return memoryview(array).cast("B")


def _map(at: int, size_bytes: int, protection: int, kind: int, file: int) -> int:
    found = _C.mmap(at, size_bytes, protection, kind, file, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(found)


def advise(memory: memoryview, advice: int, start: int, stop: int) -> bool:
    """Gives the kernel ``advice`` on the pages of ``memory`` from ``start`` to ``stop``; returns whether it was taken."""
    return bool(_C.madvise(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + start, stop - start, advice) == 0)


@functools.cache
def has_huge_pages(folder: Path = FOLDER) -> bool:
    """Returns whether shared memory in ``folder`` can be moved to huge pages (Linux 6.1), which is tried with one."""
    try:
        with Segment.create("probe", "huge", HUGE_PAGE_BYTES, folder) as segment:
            return advise(segment._map, _COLLAPSE, 0, HUGE_PAGE_BYTES)
    except RunError:
        return False


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


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def file_bytes(size_bytes: int) -> int:
    """Returns the bytes of the file of a segment of ``size_bytes``, a multiple of the page size, with the page of its label."""
    return size_bytes + mmap.PAGESIZE


def check_free(size_bytes: int, folder: Path = FOLDER) -> None:
    """Raises ``RunError`` where ``folder`` cannot be written, or has fewer than ``size_bytes`` free."""
    try:
        os.close(os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600))
    except OSError as error:
        raise RunError(
            f"shared memory in {folder} cannot be created: {error.strerror}; mount a tmpfs there that this user can write (in Kubernetes: a volume emptyDir "
            "with medium Memory)"
        ) from None
    free = free_bytes(folder)
    if free < size_bytes:
        raise RunError(
            f"this run needs {size_bytes / 2**20:,.1f} MiB of shared memory for its weights and {folder} has {free / 2**20:,.1f} MiB free; make {folder} "
            "larger (in a container: --shm-size) or free what is in it"
        )
