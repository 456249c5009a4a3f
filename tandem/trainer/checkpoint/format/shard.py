"""The parts of a training state that a rank holds, and the assignment of parts to the ranks that write them. Imports no torch."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tandem.layout.shard_offsets import ShardOffsets, offsets_of_range
from tandem.types.dtypes import DTYPE_BYTES

if TYPE_CHECKING:
    from torch import Tensor


CRITIC, REFERENCE, DRAFT = "critic", "reference", "draft"
"""The models that are saved beside the actor: the critic, a reference that follows the actor, and a draft head."""
_BESIDE = {f"{model}/": model for model in (CRITIC, REFERENCE, DRAFT)}


class Key(NamedTuple):
    """Names a tensor of the state. ``state``: ``weights``, ``exp_avg``, ``master`` or another tensor kind of an optimizer, of another model
    after its name (``beside``); ``name``: the parameter's."""

    state: str
    name: str

    def beside(self, model: str) -> "Key":
        """Returns the same tensor of the ``model`` that is saved beside the actor."""
        return Key(f"{model}/{self.state}", self.name)

    def split(self) -> tuple[str, "Key"]:
        """Returns the model beside the actor (empty: the actor) and its own key."""
        prefix = next((prefix for prefix in _BESIDE if self.state.startswith(prefix)), "")
        return _BESIDE.get(prefix, ""), Key(self.state.removeprefix(prefix), self.name)

    def __str__(self) -> str:
        return f"{self.state}/{self.name}"


class Shard(NamedTuple):
    """A part of a tensor: the elements ``offsets`` of ``key``, whose full shape is ``whole``. ``tensor`` has their shape; a checkpoint is
    written from it or read into it."""

    key: Key
    whole: tuple[int, ...]
    offsets: ShardOffsets
    tensor: "Tensor"


class Piece(NamedTuple):
    """A shard without its values: the metadata that other ranks need. ``dtype``: its name, such as ``float32``."""

    key: Key
    whole: tuple[int, ...]
    offsets: ShardOffsets
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.offsets.numel * DTYPE_BYTES[self.dtype]


def piece_of(shard: Shard) -> Piece:
    return Piece(shard.key, shard.whole, shard.offsets, str(shard.tensor.dtype).removeprefix("torch."))


def flat_shards(key: Key, whole: tuple[int, ...], offsets: ShardOffsets, first: int, values: "Tensor") -> list[Shard]:
    """Returns the shards of a run of memory. ``values[n]``: the elements from ``first`` on of the row-major memory of the part ``offsets``."""
    shards, taken = [], 0
    for run in offsets_of_range(offsets.shape, first, first + values.numel()):
        part = values[taken : taken + run.numel].view(run.shape)
        shards.append(Shard(key, whole, run.moved(offsets.start), part))
        taken += run.numel
    return shards


def divide(held: Sequence[Iterable[Piece]]) -> list[set[tuple[Key, ShardOffsets]]]:
    """Returns for every rank the parts that it writes of those it holds (``held`` by rank).

    Each part is written once, by the holder with the fewest bytes assigned so far; ties go to the lowest rank. A pure function, so every
    rank computes the same assignment."""
    holders: dict[tuple[Key, ShardOffsets], list[int]] = {}
    sizes: dict[tuple[Key, ShardOffsets], int] = {}
    for rank, pieces in enumerate(held):
        for piece in pieces:
            part = (piece.key, piece.offsets)
            holders.setdefault(part, []).append(rank)
            sizes[part] = piece.nbytes
    loads = [0] * len(held)
    chosen: list[set[tuple[Key, ShardOffsets]]] = [set() for _ in held]
    # Parts with a single holder are assigned first; the rest then balances the loads, the largest first.
    for part in sorted(holders, key=lambda part: (len(holders[part]) > 1, -sizes[part], part)):
        rank = min(holders[part], key=lambda rank: (loads[rank], rank))
        loads[rank] += sizes[part]
        chosen[rank].add(part)
    return chosen
