"""Memory of packed weights, in pages of 2 MiB where the system has them.

A decoding step reads every weight once. With pages of 4 KiB the processor looks up each of them and stops reading ahead at its end, and a
matrix of a small model has no whole large page. So weights lie one behind the other in pieces of many pages.
"""

import contextlib
import mmap
import threading

import torch
from torch import Tensor, uint8

PAGE_BYTES = 2 << 20
PIECE_BYTES = 16 * PAGE_BYTES
_LINE = 64


class PackedMemory:
    """Hands out bytes of pieces. A piece is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._piece = torch.empty(0, dtype=uint8)

    def take(self, size_bytes: int) -> Tensor:
        """Returns ``size_bytes`` uninitialised bytes on a cache line."""
        if size_bytes > PIECE_BYTES // 2:
            return _piece(size_bytes)[:size_bytes]
        with self._lock:
            if len(self._piece) < size_bytes:
                self._piece = _piece(PIECE_BYTES)
            taken, self._piece = self._piece[:size_bytes], self._piece[-(-size_bytes // _LINE) * _LINE :]
        return taken


def _piece(size_bytes: int) -> Tensor:
    """Returns at least so many bytes of memory of its own, from the beginning of a large page on."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size_bytes, dtype=uint8)
    mapped = mmap.mmap(-1, -(-size_bytes // PAGE_BYTES + 1) * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # A system without large pages has the same bytes in small ones.
        mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapped, dtype=uint8)
    return whole[-whole.data_ptr() % PAGE_BYTES :]
