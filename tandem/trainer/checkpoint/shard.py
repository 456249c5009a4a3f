"""What a rank holds of a training state, and which rank writes what of it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.layout.shard_offsets import ShardOffsets, boxes_of_range


class Key(NamedTuple):
    """``state`` is ``weights``, ``exp_avg``, ``master`` or what else an optimizer keeps; ``name`` the parameter's."""

    state: str
    name: str

    def __str__(self) -> str:
        return f"{self.state}/{self.name}"


class Shard(NamedTuple):
    """One part of a whole tensor: the elements ``box`` of ``key``, whose whole shape is ``whole``. ``tensor`` has the box's
    shape; a checkpoint is written from it, or read into it."""

    key: Key
    whole: tuple[int, ...]
    box: ShardOffsets
    tensor: Tensor


class Piece(NamedTuple):
    """A shard without its numbers: what other ranks need to know of it."""

    key: Key
    whole: tuple[int, ...]
    box: ShardOffsets
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


def piece_of(shard: Shard) -> Piece:
    return Piece(shard.key, shard.whole, shard.box, shard.tensor.dtype)


def flat_shards(key: Key, whole: tuple[int, ...], box: ShardOffsets, first: int, values: Tensor) -> list[Shard]:
    """The shards of a rank that holds a run of a part's memory: ``values`` (one axis) are the elements from ``first`` on of the
    row-major memory of the part ``box``."""
    found, taken = [], 0
    for run in boxes_of_range(box.shape, first, first + values.numel()):
        part = values[taken : taken + run.numel].view(run.shape)
        found.append(Shard(key, whole, run.moved(box.start), part))
        taken += run.numel
    return found


def divide(held: Sequence[Iterable[Piece]]) -> list[set[tuple[Key, ShardOffsets]]]:
    """Who writes what: for every rank the parts that it writes of those it holds (``held`` by rank). Each part is written
    once; of several holders the one that has least to write so far, the first among equals. A pure function, so that every
    rank finds the same."""
    holders: dict[tuple[Key, ShardOffsets], list[int]] = {}
    sizes: dict[tuple[Key, ShardOffsets], int] = {}
    for rank, pieces in enumerate(held):
        for piece in pieces:
            part = (piece.key, piece.box)
            holders.setdefault(part, []).append(rank)
            sizes[part] = piece.nbytes
    loads = [0] * len(held)
    chosen: list[set[tuple[Key, ShardOffsets]]] = [set() for _ in held]
    # What only one rank holds comes first: the rest evens out the loads, the largest before the smallest.
    for part in sorted(holders, key=lambda part: (len(holders[part]) > 1, -sizes[part], part)):
        rank = min(holders[part], key=lambda rank: (loads[rank], rank))
        loads[rank] += sizes[part]
        chosen[rank].add(part)
    return chosen
