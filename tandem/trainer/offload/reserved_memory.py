"""Memory whose addresses stay while its pages come and go."""

import ctypes
import logging
import mmap
from collections.abc import Callable
from functools import cache

import torch

logger = logging.getLogger(__name__)
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4
_FAILED = ctypes.c_void_p(-1).value


class ReservedMemory:
    """``tensor``: ``length`` numbers at addresses of their own for good: whatever was made of it, a view too, finds what lies there at that
    time. Its pages are the system's, and read as zeros, until they are written, and again after ``release``."""

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        # Memory of the C library's would be cut up by what is allocated between two uses.
        self._memory = mmap.mmap(-1, max(1, length) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._memory, dtype=dtype)[:length]
        self.nbytes = -(-len(self._memory) // mmap.PAGESIZE) * mmap.PAGESIZE

    def release(self) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED)

    def give_pages(self, to: "ReservedMemory") -> bool:
        """Moves its pages, with what they hold, to the addresses of ``to``, which has as many bytes. The system changes page tables and copies
        nothing. Returns whether it could: Linux from 5.7 on."""
        mremap = _mremap()
        if mremap is None:
            return False
        begin, there = self.tensor.data_ptr(), to.tensor.data_ptr()
        return mremap(begin, self.nbytes, self.nbytes, _MAYMOVE | _FIXED | _DONTUNMAP, there) != _FAILED


class PagePool:
    """Pages that memory of one size hands on to the next that is in use, instead of giving them back to the system and touching new ones.
    At most ``most`` are kept of each size."""

    def __init__(self, most: int = 2) -> None:
        self._most = most
        self._kept: dict[int, list[ReservedMemory]] = {}
        self._empty: dict[int, list[ReservedMemory]] = {}

    def fill(self, memory: ReservedMemory) -> None:
        """Give ``memory``, which has no pages, those that are kept, if there are any: what they hold is undefined."""
        kept = self._kept.get(memory.nbytes)
        if kept:
            source = kept.pop()
            source.give_pages(memory)
            self._empty.setdefault(memory.nbytes, []).append(source)

    def take(self, memory: ReservedMemory) -> None:
        """Leave ``memory`` without pages."""
        kept, empty = self._kept.setdefault(memory.nbytes, []), self._empty.setdefault(memory.nbytes, [])
        if len(kept) < self._most:
            target = empty.pop() if empty else ReservedMemory(memory.tensor.numel(), memory.tensor.dtype)
            if memory.give_pages(target):
                kept.append(target)
                return
            empty.append(target)
        memory.release()


@cache
def _mremap() -> Callable[..., int | None] | None:
    try:
        found = ctypes.CDLL(None, use_errno=True).mremap
    except (OSError, AttributeError):
        logger.debug("no mremap on this system; pages go back to it")
        return None
    found.restype = ctypes.c_void_p
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    return found  # type: ignore[no-any-return]
