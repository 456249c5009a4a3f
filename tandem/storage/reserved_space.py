"""Room on the disk for a file before it is written."""

import errno
import os

_COUNTED_BYTES = 512
"""The unit of ``st_blocks``."""


def reserve(descriptor: int, size_bytes: int) -> None:
    """Allocates the open file up to ``size_bytes``, where the system can; new bytes are 0. Raises ``OSError``, for a full disk ``ENOSPC``.

    Where the file does not fit nothing is allocated: ``fallocate`` by itself takes all that is left before it fails, and for that time every other process
    finds the disk full.
    """
    if not size_bytes or not hasattr(os, "posix_fallocate"):
        return
    disk, held_bytes = os.fstatvfs(descriptor), os.fstat(descriptor).st_blocks * _COUNTED_BYTES
    # A file system without a limit of its own says that it has 0 blocks.
    if disk.f_blocks and size_bytes - held_bytes > disk.f_bavail * disk.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate(descriptor, 0, size_bytes)
