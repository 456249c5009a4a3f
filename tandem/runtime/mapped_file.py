"""Files as shared memory of several processes."""

import mmap
import os
from pathlib import Path


def mapped_file(path: Path, size: int) -> mmap.mmap:
    """Returns the first ``size`` bytes of the file ``path`` as shared memory; it is created, of zeros, if it does not exist."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
