"""Reads parts of tensors from shared memory: all of a part or the slice that a reader needs, with the digest of what was copied."""

import ctypes
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from tandem.layout.shard_offsets import ShardOffsets, flat_range, intersection, whole_offsets
from tandem.types.dtypes import DTYPE_BYTES
from tandem.types.weights import PartEntry, TensorEntry
from tandem.weight_transfer.copying import CHUNK_BYTES, copy_and_digest
from tandem.weight_transfer.manifest import offsets_of, part_offsets
from tandem.weight_transfer.panels import read_panels

Wanted = Callable[[str, tuple[int, ...]], ShardOffsets | None]
"""(name, whole shape) -> the elements of a tensor that a reader needs; ``None``: none."""


def wants_all(name: str, shape: tuple[int, ...]) -> ShardOffsets | None:
    """Returns the whole tensor, for an engine of one rank."""
    return whole_offsets(shape)


class PartCopy(NamedTuple):
    """A part to read: ``size_bytes`` from ``offset_bytes`` of the segment on, all of which is read for its digest. ``offsets``: the elements
    needed of the tensor, of which the part contains ``common``. ``to``: the element offset of the whole part in the row-major memory of
    ``offsets``; ``None`` if it is not contiguous there, or is not row-major itself."""

    entry: TensorEntry
    part: PartEntry
    offset_bytes: int
    size_bytes: int
    offsets: ShardOffsets
    common: ShardOffsets
    to: int | None

    def read(self, source: int, out: Tensor) -> bool:
        """Copies the needed elements from the segment at address ``source`` to ``out`` (of the shape of ``offsets``); returns whether the digest of
        the copied bytes is the part's."""
        source += self.offset_bytes
        if self.to is not None:
            destination = out.data_ptr() + self.to * out.element_size()
            return copy_and_digest(destination, source, self.size_bytes, of_source=False) == self.part.digest
        part = offsets_of(self.part)
        if self.entry.layout == "panels":
            return read_panels(source, part.shape, self.common.within(part), out[self.common.within(self.offsets).slices]) == self.part.digest
        return _scatter(source, part.shape, self.common.within(part), out[self.common.within(self.offsets).slices]) == self.part.digest


def is_row_major(entry: TensorEntry) -> bool:
    """Returns whether a tensor is one row-major tensor where it was published: in rows, of parts that lie one behind the other in it."""
    return entry.layout == "rows" and all(flat_range(entry.shape, offsets_of(part)) is not None for part in entry.parts)


def part_copies(entry: TensorEntry, offsets: ShardOffsets) -> list[PartCopy]:
    """Returns the parts of ``entry`` that contain elements of ``offsets``."""
    is_in_rows = entry.layout == "rows"
    if is_in_rows and len(entry.parts) == 1 and offsets.shape == entry.shape:
        return [PartCopy(entry, entry.parts[0], entry.offset_bytes, entry.size_bytes, offsets, offsets, 0)]
    copies = []
    for part, offset in zip(entry.parts, part_offsets(entry), strict=True):
        held = offsets_of(part)
        common = intersection(held, offsets)
        if common is not None:
            run = flat_range(offsets.shape, common.within(offsets)) if common == held and is_in_rows else None
            to = None if run is None else run.start
            copies.append(PartCopy(entry, part, offset, held.numel * DTYPE_BYTES[entry.dtype], offsets, common, to))
    return copies


def _scatter(source: int, shape: tuple[int, ...], chosen: ShardOffsets, out: Tensor) -> str:
    """Copies the elements ``chosen`` of the contiguous part of ``shape`` at ``source`` to ``out``, a few rows at a time through private
    memory; returns the digest of the whole part as it was copied there."""
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
