"""Assembles whole matrices from the pieces that ranks update, and splits them again, for optimizers that are not elementwise."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Size, Tensor

from tandem.runtime.collectives.communicator import Communicator
from tandem.trainer.parallel.flat_buffer import FlatBuffer, Segment

Axis = Literal[-2, -1]
ROWS: Axis = -2
COLUMNS: Axis = -1
ALONE = Communicator("alone", 0, 1, None, 0.0)


class Stack(NamedTuple):
    """A parameter as its tensor-parallel rank holds it, ``shape`` [M, N], or [E, M, N] of E experts: matrices of ``rows`` rows, stacked.
    ``axis``: the axis along which tensor parallelism shards each of them (``None``: each rank holds them whole)."""

    shape: Size
    rows: tuple[int, ...]
    axis: Axis | None = None


class Matrices:
    """The parameters in ``stacks``, by name, of which this rank updates pieces: its parts of ``buckets`` under ZeRO, or all that it holds
    without buckets. ``tensor``: the ranks that each hold a shard of a matrix. All ranks of it and of the buckets' groups call ``held`` and
    ``whole`` in the same order."""

    def __init__(self, stacks: Mapping[str, Stack], tensor: Communicator = ALONE, buckets: Sequence[FlatBuffer] = ()) -> None:
        self.stacks, self._tensor = stacks, tensor
        self._buckets = [bucket for bucket in buckets if not stacks.keys().isdisjoint(bucket.parameters)]
        self._segments = {segment.name: segment for bucket in self._buckets for segment in bucket.segments()}
        self._is_sharded = bool(buckets)

    def held(self, piece: Callable[[str], Tensor | None]) -> Iterator[tuple[str, Tensor]]:
        """Yields every parameter as its tensor-parallel rank holds it, assembled from the results of ``piece`` here and on the other ranks,
        with one bucket in memory at a time. Without sharding, parameters without a piece are left out."""
        if not self._is_sharded:
            given = ((name, piece(name)) for name in self.stacks)
            yield from ((name, tensor) for name, tensor in given if tensor is not None)
            return
        for bucket in self._buckets:
            own = bucket.like.new_zeros(bucket.part)
            for segment in bucket.segments():
                if segment.name in self.stacks and (given_piece := piece(segment.name)) is not None:
                    own[segment.at : segment.at + segment.last - segment.first] = given_piece
            gathered = bucket.ranks.all_gather(own, f"update directions of {bucket.label}").view(-1)
            for name, view in bucket.views(gathered).items():
                if name in self.stacks:
                    yield name, view

    def whole(self, name: str, held: Tensor) -> list[Tensor]:
        """Returns the whole matrices of a parameter."""
        stack = self.stacks[name]
        if stack.axis is None:
            return list(held.split(stack.rows, -2))
        from_ranks = self._tensor.all_gather(held, f"update direction of {name}")
        # Each rank stacks its rows of q, k and v, so the ranks' shards are joined matrix by matrix.
        return [torch.cat(parts, stack.axis) for parts in zip(*(part.split(stack.rows, -2) for part in from_ranks), strict=True)]

    def own(self, name: str, matrices: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields this rank's piece of a parameter from ``matrices``: (slice of the flat piece, elements, the matrix they are from).
        Experts' matrices have one shape and are joined."""
        stack, first, last = self.stacks[name], *self._run(name)
        parts = matrices if stack.axis is None else [m.chunk(self._tensor.size, stack.axis)[self._tensor.rank] for m in matrices]
        at = 0
        for part, matrix in zip(parts if len(stack.shape) == 2 else [torch.cat(list(parts), -2)], matrices, strict=False):
            start, stop = max(first, at), min(last, at + part.numel())
            if start < stop:
                yield slice(start - first, stop - first), part.reshape(-1)[start - at : stop - at], matrix
            at += part.numel()

    def _run(self, name: str) -> tuple[int, int]:
        """Returns the range of flat elements, of those its tensor-parallel rank holds, that this rank updates."""
        if not self._is_sharded:
            return 0, self.stacks[name].shape.numel()
        segment = self._segments.get(name, Segment(name, 0, 0, 0))
        return segment.first, segment.last
