"""Files past the system's memory: what is written goes straight to the disk, and what is read comes from it.

The system's own copy of a file costs a page for every page and, where memory is full of other files, more time than the disk. Direct transfers
(Linux, ``O_DIRECT``) want addresses, places and sizes that are multiples of the disk's block; whatever is not, and file systems without them,
go the usual way.
"""

import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tandem.storage.disk_space import reserve

BLOCK_BYTES = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)


def write_new(path: Path, chunks: Iterable[memoryview], size: int) -> None:
    """Make the file ``path`` of ``chunks`` (bytes), ``size`` in all, and bring it to the disk. Raises ``OSError``, for a full disk before the first
    byte is written."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        reserve(descriptor, size)
        is_direct = _set_direct(descriptor, True)
        for chunk in chunks:
            while chunk:
                whole = len(chunk) // BLOCK_BYTES * BLOCK_BYTES
                if is_direct and not whole:
                    is_direct = _set_direct(descriptor, False)
                try:
                    chunk = chunk[os.write(descriptor, chunk[:whole] if is_direct else chunk) :]
                except OSError as error:
                    if not is_direct or error.errno != errno.EINVAL:
                        raise
                    is_direct = _set_direct(descriptor, False)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_from_disk(path: Path, size: int, chunk_bytes: int) -> Iterator[memoryview]:
    """The first ``size`` bytes of ``path`` in chunks, not from the memory in which the system keeps what was written a moment ago. A chunk is
    good until the next one. Raises ``ValueError`` where the file is shorter."""
    descriptor = os.open(path, os.O_RDONLY)
    memory = memoryview(mmap.mmap(-1, chunk_bytes))
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        is_direct = chunk_bytes % BLOCK_BYTES == 0 and _set_direct(descriptor, True)
        for start in range(0, size, chunk_bytes):
            wanted = min(chunk_bytes, size - start)
            asked = -(-wanted // BLOCK_BYTES) * BLOCK_BYTES
            try:
                count = os.preadv(descriptor, [memory[: asked if is_direct else wanted]], start)
            except OSError as error:
                if not is_direct or error.errno != errno.EINVAL:
                    raise
                is_direct = _set_direct(descriptor, False)
                count = os.preadv(descriptor, [memory[:wanted]], start)
            if count < wanted:
                raise ValueError("it became shorter")
            yield memory[:wanted]
    finally:
        os.close(descriptor)


def _set_direct(descriptor: int, on: bool) -> bool:
    """Whether the file is written directly from now on."""
    if not _DIRECT:
        return False
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)
    except OSError:
        return False
    return on
