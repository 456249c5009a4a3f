"""Memory with fixed addresses whose physical pages can be released and transferred."""

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
    """``tensor``: ``length`` elements at fixed addresses, so that views of it stay valid. Its pages are zero until written, and again after
    ``release``."""

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        # A mapping of its own, because the allocator would fragment the memory between two uses.
        self._memory = mmap.mmap(-1, max(1, length) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._memory, dtype=dtype)[:length]
        self.nbytes = -(-len(self._memory) // mmap.PAGESIZE) * mmap.PAGESIZE

    def release(self) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED)

    def give_pages(self, to: "ReservedMemory") -> bool:
        """Moves the pages and their content to the addresses of ``to``, which has the same size. Changes page tables and copies nothing.
        Returns whether the system supports it (Linux 5.7 or later)."""
        mremap = _mremap()
        if mremap is None:
            return False
        begin, there = self.tensor.data_ptr(), to.tensor.data_ptr()
        return mremap(begin, self.nbytes, self.nbytes, _MAYMOVE | _FIXED | _DONTUNMAP, there) != _FAILED


class PagePool:
    """Passes pages from one memory to the next of the same size, instead of releasing and faulting them again. Keeps at most ``most`` per
    size."""

    def __init__(self, most: int = 2) -> None:
        self._most = most
        self._kept: dict[int, list[ReservedMemory]] = {}
        self._empty: dict[int, list[ReservedMemory]] = {}

    def fill(self, memory: ReservedMemory) -> None:
        """Gives pooled pages, if any, to ``memory``, which has none. Their content is undefined."""
        kept = self._kept.get(memory.nbytes)
        if kept:
            source = kept.pop()
            source.give_pages(memory)
            self._empty.setdefault(memory.nbytes, []).append(source)

    def take(self, memory: ReservedMemory) -> None:
        """Takes the pages of ``memory``."""
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
        mremap = ctypes.CDLL(None, use_errno=True).mremap
    except (OSError, AttributeError):
        logger.debug("mremap is not available; pages are released instead of reused")
        return None
    mremap.restype = ctypes.c_void_p
    mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    return mremap  # type: ignore[no-any-return]
