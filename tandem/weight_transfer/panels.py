"""Writes matrices in the layout of ``tandem.layout.panels``, with the digest of what was written, and reads them back row by row."""

import ctypes
import math
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from tandem.layout.panels import PANEL_ROWS
from tandem.layout.shard_offsets import ShardOffsets
from tandem.runtime.machine.tensor_bytes import bytes_view
from tandem.weight_transfer.copying import digest_of, looks_equal

DIGESTED_BYTES = 241
"""The fewest bytes that kernels digest; xxh3 has other rules for fewer."""
_SAMPLE_COLUMNS = 16


class PublishingKernels(Protocol):
    """The kernels that multiply with panels (``tandem.kernels.cpu``)."""

    def pack_part(self, weight: Tensor, panel: int, first: int, deep: int, to: int) -> None:
        """Writes some columns of panel ``panel`` of ``weight[N, K]`` to an address."""
        ...

    def write_panels(self, weight: Tensor, to: int | None) -> str:
        """Writes all panels of ``weight[N, K]`` to an address, or nowhere; returns their digest."""
        ...

    def copy_and_digest(self, to: int, source: int, size_bytes: int) -> str:
        """Copies between addresses past the cache; returns the digest of the bytes."""
        ...


def write_panels(kernels: PublishingKernels, source: Tensor, destination: int | None) -> str:
    """Writes ``source[N, K]`` in panels to the address ``destination`` (``None``: nowhere). Returns the xxh3-128 of the panels, in hexadecimal."""
    if source.nbytes >= DIGESTED_BYTES:
        return kernels.write_panels(source, destination)
    small = torch.empty_like(source)
    kernels.pack_part(source, 0, 0, source.shape[1], small.data_ptr())
    if destination is not None:
        ctypes.memmove(destination, small.data_ptr(), small.nbytes)
    return digest_of(small.data_ptr(), small.nbytes)


def look_equal(kernels: PublishingKernels, source: Tensor, panels: int) -> bool:
    """Returns whether samples of ``source[N, K]`` are equal to what is in panels at the address ``panels`` (see ``copying.looks_equal``): the beginning, the
    middle and the end of its first and its last panel."""
    rows, columns = source.shape
    deep, sample = min(columns, _SAMPLE_COLUMNS), torch.empty(PANEL_ROWS * _SAMPLE_COLUMNS, dtype=source.dtype)
    for panel in {0, (rows - 1) // PANEL_ROWS}:
        width = min(PANEL_ROWS, rows - panel * PANEL_ROWS)
        for first in {0, columns // 2 // 16 * 16, max(0, columns - 1) // 16 * 16}:
            count = min(deep, columns - first)
            kernels.pack_part(source, panel, first, count, sample.data_ptr())
            at = panels + (panel * PANEL_ROWS * columns + first * width) * source.element_size()
            if not looks_equal(sample.data_ptr(), at, count * width * source.element_size()):
                return False
    return True


def read_panels(source: int, shape: tuple[int, ...], chosen: ShardOffsets, out: Tensor) -> str:
    """Copies the elements ``chosen`` of the matrix of ``shape`` that is in panels at the address ``source`` to ``out``, a panel at a time through private
    memory; returns the xxh3-128 of all panels as they were copied there."""
    rows, columns = shape
    digest, staged = xxhash.xxh3_128(), torch.empty(min(PANEL_ROWS, rows) * columns, dtype=out.dtype)
    for first in range(0, rows, PANEL_ROWS):
        width = min(PANEL_ROWS, rows - first)
        size_bytes = width * columns * out.element_size()
        ctypes.memmove(staged.data_ptr(), source + first * columns * out.element_size(), size_bytes)
        digest.update(bytes_view(staged)[:size_bytes])
        begin, end = max(first, chosen.start[0]), min(first + width, chosen.stop[0])
        if begin < end:
            plain = staged[: math.prod((width, columns))].view(columns, width).t()
            out[begin - chosen.start[0] : end - chosen.start[0]] = plain[begin - first : end - first, chosen.slices[1]]
    return digest.hexdigest()
