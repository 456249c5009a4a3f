"""Memory whose addresses stay while its pages come and go."""

import mmap

import torch


class ReservedMemory:
    """``tensor``: ``length`` numbers at addresses of their own for good: whatever was made of it, a view too, finds what lies there at that
    time. Its pages are the system's, and read as zeros, until they are written, and again after ``release``."""

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        # Memory of the C library's would be cut up by what is allocated between two uses.
        self._memory = mmap.mmap(-1, max(1, length) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._memory, dtype=dtype)[:length]

    def release(self) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED)
