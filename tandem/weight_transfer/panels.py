"""Writes matrices in the layout of ``tandem.layout.panels``, with the digest of what was written, and reads them back row by row."""

import ctypes
import math
import threading
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from tandem.layout.panels import PANEL_ROWS
from tandem.layout.shard_offsets import ShardOffsets
from tandem.weight_transfer.copying import CHUNK_BYTES, looks_equal

_own = threading.local()


class PacksPanels(Protocol):
    """The kernels that multiply with panels (``tandem.kernels.cpu``)."""

    def pack_part(self, weight: Tensor, panel: int, first: int, deep: int, to: int) -> None:
        """Writes some columns of panel ``panel`` of ``weight[N, K]`` to an address."""
        ...

    def stream(self, to: int, source: int, size_bytes: int) -> None:
        """Copies past the cache."""
        ...


def write_panels(kernels: PacksPanels, source: Tensor, destination: int | None) -> str:
    """Writes ``source[N, K]`` in panels to the address ``destination`` (``None``: nowhere), a piece of a panel at a time, which is digested where it is put
    together, in the cache. Returns the xxh3-128 of the panels, in hexadecimal."""
    rows, columns = source.shape
    deep, digest, piece = max(16, CHUNK_BYTES // (PANEL_ROWS * source.element_size()) // 16 * 16), xxhash.xxh3_128(), _piece()
    at = 0
    for panel in range(-(-rows // PANEL_ROWS)):
        width_bytes = min(PANEL_ROWS, rows - panel * PANEL_ROWS) * source.element_size()
        for first in range(0, columns, deep):
            count = min(deep, columns - first)
            kernels.pack_part(source, panel, first, count, piece)
            digest.update((ctypes.c_char * (count * width_bytes)).from_address(piece))
            if destination is not None:
                kernels.stream(destination + at, piece, count * width_bytes)
            at += count * width_bytes
    return digest.hexdigest()


def look_equal(kernels: PacksPanels, source: Tensor, panels: int) -> bool:
    """Returns whether samples of ``source[N, K]`` are equal to what is in panels at the address ``panels`` (see ``copying.looks_equal``): the beginning, the
    middle and the end of its first and its last panel."""
    rows, columns = source.shape
    deep = min(columns, 16)
    for panel in {0, (rows - 1) // PANEL_ROWS}:
        width = min(PANEL_ROWS, rows - panel * PANEL_ROWS)
        for first in {0, columns // 2 // 16 * 16, max(0, columns - 1) // 16 * 16}:
            count = min(deep, columns - first)
            kernels.pack_part(source, panel, first, count, _piece())
            at = panels + (panel * PANEL_ROWS * columns + first * width) * source.element_size()
            if not looks_equal(_piece(), at, count * width * source.element_size()):
                return False
    return True


def _piece() -> int:
    """Returns the address of this thread's memory for a piece of a panel, on a cache line."""
    memory: Tensor | None = getattr(_own, "memory", None)
    if memory is None:
        memory = _own.memory = torch.empty(2 * CHUNK_BYTES, dtype=torch.uint8)
    return -(-memory.data_ptr() // 64) * 64


def read_panels(source: int, shape: tuple[int, ...], chosen: ShardOffsets, out: Tensor) -> str:
    """Copies the elements ``chosen`` of the matrix of ``shape`` that is in panels at the address ``source`` to ``out``, a panel at a time through private
    memory; returns the xxh3-128 of all panels as they were copied there."""
    rows, columns = shape
    digest, staged = xxhash.xxh3_128(), torch.empty(min(PANEL_ROWS, rows) * columns, dtype=out.dtype)
    for first in range(0, rows, PANEL_ROWS):
        width = min(PANEL_ROWS, rows - first)
        size_bytes = width * columns * out.element_size()
        ctypes.memmove(staged.data_ptr(), source + first * columns * out.element_size(), size_bytes)
        digest.update((ctypes.c_char * size_bytes).from_address(staged.data_ptr()))
        begin, end = max(first, chosen.start[0]), min(first + width, chosen.stop[0])
        if begin < end:
            plain = staged[: math.prod((width, columns))].view(columns, width).t()
            out[begin - chosen.start[0] : end - chosen.start[0]] = plain[begin - first : end - first, chosen.slices[1]]
    return digest.hexdigest()
