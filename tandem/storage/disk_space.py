"""How much room a disk has, and room on it for a file before it is written."""

import errno
import os
from pathlib import Path

_COUNTED_BYTES = 512
"""The unit of ``st_blocks``."""
_WITHOUT_LIMIT = 2**63


def free_bytes(folder: Path | int) -> int:
    """Returns the bytes that a process may still write to the disk of ``folder``, which need not exist yet, or of an open file: 2**63 where the file system
    has no limit of its own. Raises ``OSError``."""
    if isinstance(folder, Path):
        folder = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    disk = os.statvfs(folder)
    # A file system without a limit says that it has 0 blocks.
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else _WITHOUT_LIMIT


def reserve(descriptor: int, size_bytes: int) -> None:
    """Allocates the open file up to ``size_bytes``, where the system can; new bytes are 0. Raises ``OSError``, for a full disk ``ENOSPC``.

    Where the file does not fit nothing is allocated: ``fallocate`` by itself takes all that is left before it fails, and for that time every other process
    finds the disk full.
    """
    if not size_bytes or not hasattr(os, "posix_fallocate"):
        return
    if size_bytes - os.fstat(descriptor).st_blocks * _COUNTED_BYTES > free_bytes(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate(descriptor, 0, size_bytes)
