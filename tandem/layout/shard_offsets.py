"""Rectangular parts of a tensor, as plain data: the shards of a whole tensor. Imports no torch."""

import math
from collections.abc import Iterable, Iterator
from operator import sub
from typing import NamedTuple


class ShardOffsets(NamedTuple):
    """The elements with ``start[i] <= index[i] < stop[i]`` along every axis i of a whole tensor."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def within(self, outer: "ShardOffsets") -> "ShardOffsets":
        """Returns the same elements, relative to the origin of ``outer``."""
        shift = lambda corner: tuple(a - b for a, b in zip(corner, outer.start, strict=True))
        return ShardOffsets(shift(self.start), shift(self.stop))

    def moved(self, start: tuple[int, ...]) -> "ShardOffsets":
        """Returns the same elements with their origin moved to ``start``."""
        move = lambda corner: tuple(a + b for a, b in zip(corner, start, strict=True))
        return ShardOffsets(move(self.start), move(self.stop))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))


def whole_offsets(shape: tuple[int, ...]) -> ShardOffsets:
    return ShardOffsets((0,) * len(shape), shape)


def intersection(a: ShardOffsets, b: ShardOffsets) -> ShardOffsets | None:
    """Returns the elements in both, ``None`` if there are none."""
    common = ShardOffsets(tuple(map(max, a.start, b.start)), tuple(map(min, a.stop, b.stop)))
    return common if all(size > 0 for size in common.shape) else None


def flat_range(shape: tuple[int, ...], offsets: ShardOffsets) -> range | None:
    """Returns the row-major indices of the elements of ``offsets`` in a tensor of ``shape``; ``None`` if they are not contiguous."""
    first, has_several = 0, False
    for size, start, stop in zip(shape, offsets.start, offsets.stop, strict=True):
        if has_several and (start, stop) != (0, size):
            return None
        has_several = has_several or stop - start != 1
        first = first * size + start
    return range(first, first + offsets.numel)


def offsets_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[ShardOffsets]:
    """Yields the elements ``start .. stop - 1`` of a tensor's row-major memory as rectangular parts, in memory order: at most 2 n - 1 of
    them for n axes."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield ShardOffsets((start,), (stop,)) if shape else ShardOffsets((), ())
        return
    inner = shape[1:]
    size = math.prod(inner)

    def of_one_row(row: int, first: int, last: int) -> Iterator[ShardOffsets]:
        for part in offsets_of_range(inner, first, last):
            yield ShardOffsets((row, *part.start), (row + 1, *part.stop))

    first, last = start // size, stop // size
    if first == last:
        yield from of_one_row(first, start % size, stop % size)
        return
    if start % size:
        yield from of_one_row(first, start % size, size)
        first += 1
    if first < last:
        yield ShardOffsets((first,) + (0,) * len(inner), (last, *inner))
    if stop % size:
        yield from of_one_row(last, 0, stop % size)


def is_covered(offsets: ShardOffsets, parts: Iterable[ShardOffsets]) -> bool:
    """Returns whether every element of ``offsets`` is in one of ``parts``."""
    left = [offsets]
    for part in parts:
        left = [rest for remaining in left for rest in difference(remaining, part)]
    return not left


def difference(offsets: ShardOffsets, part: ShardOffsets) -> Iterator[ShardOffsets]:
    """Yields ``offsets`` without ``part`` as rectangular parts: the rest before and after ``part`` along each axis, one axis after another."""
    common = intersection(offsets, part)
    if common is None:
        if offsets.numel:
            yield offsets
        return
    start, stop = list(offsets.start), list(offsets.stop)
    for axis in range(len(start)):
        if start[axis] < common.start[axis]:
            yield ShardOffsets(tuple(start), (*stop[:axis], common.start[axis], *stop[axis + 1 :]))
        if common.stop[axis] < stop[axis]:
            yield ShardOffsets((*start[:axis], common.stop[axis], *start[axis + 1 :]), tuple(stop))
        start[axis], stop[axis] = common.start[axis], common.stop[axis]
