"""Whole matrices out of the pieces that ranks update, and back: what an optimizer that is not elementwise needs."""

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
    """A parameter as its tensor-parallel rank holds it, ``shape`` [M, N], or [E, M, N] of E experts: matrices of ``rows`` rows above each
    other. ``axis``: along which the tensor-parallel ranks each hold a part of every one of them (``None``: all hold them whole)."""

    shape: Size
    rows: tuple[int, ...]
    axis: Axis | None = None


class Matrices:
    """The parameters in ``stacks``, by name, of which this rank updates pieces: with ``buckets`` those that ZeRO leaves to it, without all
    that it holds. ``tensor``: the ranks that each hold a part of a matrix. Every rank of them, and of the buckets' groups, goes through
    ``held`` and ``whole`` in the same order."""

    def __init__(self, stacks: Mapping[str, Stack], tensor: Communicator = ALONE, buckets: Sequence[FlatBuffer] = ()) -> None:
        self.stacks, self._tensor = stacks, tensor
        self._buckets = [bucket for bucket in buckets if not stacks.keys().isdisjoint(bucket.parameters)]
        self._segments = {segment.name: segment for bucket in self._buckets for segment in bucket.segments()}
        self._is_cut = bool(buckets)

    def held(self, piece: Callable[[str], Tensor | None]) -> Iterator[tuple[str, Tensor]]:
        """Every parameter as its tensor-parallel rank holds it, made of what ``piece`` gives of it here and on the other ranks; those of one
        bucket are in memory at a time. Left out where nothing is cut and there is no piece."""
        if not self._is_cut:
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
        """The matrices of a parameter, each as one process has it."""
        stack = self.stacks[name]
        if stack.axis is None:
            return list(held.split(stack.rows, -2))
        from_ranks = self._tensor.all_gather(held, f"update direction of {name}")
        # A rank's rows of q, k and v lie above each other: the ranks' are put together matrix by matrix.
        return [torch.cat(parts, stack.axis) for parts in zip(*(part.split(stack.rows, -2) for part in from_ranks), strict=True)]

    def own(self, name: str, matrices: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """What this rank's piece of a parameter takes of ``matrices``: (where in the flat piece, the numbers, the matrix they are of). Those of
        several experts have one shape and come together."""
        stack, first, last = self.stacks[name], *self._run(name)
        parts = matrices if stack.axis is None else [m.chunk(self._tensor.size, stack.axis)[self._tensor.rank] for m in matrices]
        at = 0
        for part, matrix in zip(parts if len(stack.shape) == 2 else [torch.cat(list(parts), -2)], matrices, strict=False):
            start, stop = max(first, at), min(last, at + part.numel())
            if start < stop:
                yield slice(start - first, stop - first), part.reshape(-1)[start - at : stop - at], matrix
            at += part.numel()

    def _run(self, name: str) -> tuple[int, int]:
        """Which of the flat numbers that the tensor-parallel rank holds are this rank's to update."""
        if not self._is_cut:
            return 0, self.stacks[name].shape.numel()
        segment = self._segments.get(name, Segment(name, 0, 0, 0))
        return segment.first, segment.last
