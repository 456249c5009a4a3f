"""Reads parts of tensors out of shared memory: all of a part or what a reader needs of it, with the digest of what was copied."""

import ctypes
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from tandem.layout.boxes import Box, flat_range, intersection, whole_box
from tandem.layout.bytes import DTYPE_BYTES
from tandem.types.weights import PartEntry, TensorEntry
from tandem.weight_transfer.copying import CHUNK_BYTES, copy_and_digest
from tandem.weight_transfer.manifest import box_of, part_offsets

Wanted = Callable[[str, tuple[int, ...]], Box | None]
"""(name, whole shape) -> the elements that a reader needs of a tensor; ``None``: none."""


def wants_all(name: str, shape: tuple[int, ...]) -> Box | None:
    """What an engine of one rank needs."""
    return whole_box(shape)


class PartCopy(NamedTuple):
    """One part to be read: its bytes begin at ``offset_bytes`` of the segment; ``box`` of the tensor are needed, of which the part has
    some."""

    entry: TensorEntry
    part: PartEntry
    offset_bytes: int
    box: Box

    @property
    def size_bytes(self) -> int:
        """Of the part, all of which is read: its digest is over all of it."""
        return box_of(self.part).numel * DTYPE_BYTES[self.entry.dtype]

    def read(self, source: int, out: Tensor) -> bool:
        """Copies what is needed from the segment at address ``source`` to ``out`` (of ``box``'s shape); returns whether the digest of the
        copied bytes is the part's."""
        part, source = box_of(self.part), source + self.offset_bytes
        common = intersection(part, self.box)
        assert common is not None
        run = flat_range(self.box.shape, common.within(self.box)) if common == part else None
        if run is not None:
            destination = out.data_ptr() + run.start * out.element_size()
            return copy_and_digest(destination, source, self.size_bytes, of_source=False) == self.part.digest
        return _scatter(source, part.shape, common.within(part), out[common.within(self.box).slices]) == self.part.digest


def part_copies(entry: TensorEntry, box: Box) -> list[PartCopy]:
    """The parts of ``entry`` that have elements of ``box``."""
    return [
        PartCopy(entry, part, offset, box)
        for part, offset in zip(entry.parts, part_offsets(entry), strict=True)
        if intersection(box_of(part), box) is not None
    ]


def _scatter(source: int, shape: tuple[int, ...], chosen: Box, out: Tensor) -> str:
    """Copies the elements ``chosen`` of the contiguous part of ``shape`` at ``source`` to ``out``, a few rows at a time through private
    memory; returns the digest of all of the part as it passed through there."""
    row_bytes = math.prod(shape[1:]) * out.element_size()
    rows = max(1, CHUNK_BYTES // max(1, row_bytes))
    staged = torch.empty(min(rows, shape[0]), *shape[1:], dtype=out.dtype)
    address, digest = staged.data_ptr(), xxhash.xxh3_128()
    for first in range(0, shape[0], rows):
        last = min(first + rows, shape[0])
        size = (last - first) * row_bytes
        ctypes.memmove(address, source + first * row_bytes, size)
        digest.update((ctypes.c_char * size).from_address(address))
        begin, end = max(first, chosen.start[0]), min(last, chosen.stop[0])
        if begin < end:
            out[begin - chosen.start[0] : end - chosen.start[0]] = staged[(slice(begin - first, end - first), *chosen.slices[1:])]
    return digest.hexdigest()
