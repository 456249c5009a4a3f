"""Converts the trainer's weights to Hugging Face names: which rank writes which part of which tensor, and where.

Every rank describes its shards, and all ranks derive the same plan from the descriptions. Pipeline stages, experts, tensor-parallel shards
and the runs of elements that a rank owns under ZeRO are all expressed as offsets in whole tensors. A part on several ranks has one owner.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.layout.eagle3 import PUBLISHED
from tandem.layout.expert_shapes import STANDARD_NAMES, ExpertNames
from tandem.layout.panels import Stacks, is_in_panels, is_stackable, is_stackable_in_rows, stacked_order, stacks_of
from tandem.layout.parameters import published_parameters, trained_parameters
from tandem.layout.shard_offsets import ShardOffsets, difference, intersection
from tandem.runtime.collectives.agreement import vote
from tandem.runtime.collectives.communicator import Communicator
from tandem.trainer.backend import TrainedState
from tandem.trainer.checkpoint.format.shard import Key, Piece, divide
from tandem.trainer.checkpoint.model_state import WEIGHTS
from tandem.trainer.checkpoint.replica_state import WeightShard
from tandem.types.dtypes import DTYPE_BYTES
from tandem.types.errors import RunError
from tandem.types.weights import Layout
from tandem.weight_transfer.manifest import ALIGNMENT_BYTES, are_partition, place


class Part(NamedTuple):
    """The elements ``offsets`` of a tensor, which rank ``owner`` writes at ``offset_bytes``."""

    owner: int
    offsets: ShardOffsets
    offset_bytes: int


class PlacedTensor(NamedTuple):
    """The location of a tensor in a segment, in ``layout``. ``parts`` are in the order of their ``start``, contiguous."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int
    parts: tuple[Part, ...]
    layout: Layout = "rows"


class OwnPart(NamedTuple):
    """A part that this rank writes: ``tensors[tensor].parts[part]``, of ``size_bytes``. It is ``shard``, or the elements ``offsets`` of it,
    relative to the shard's origin."""

    tensor: int
    part: int
    size_bytes: int
    shard: WeightShard
    offsets: ShardOffsets | None

    def read(self) -> Tensor:
        """Returns the part, contiguous in host memory; a view if the shard is the part."""
        whole = self.shard.read()
        return (whole if self.offsets is None else whole[self.offsets.slices]).cpu().contiguous()


@dataclass(frozen=True, slots=True)
class ConvertedWeights:
    """What ``ranks`` will write: ``tensors`` in checkpoint order, the same on every rank, and this rank's ``own`` parts. The weights are
    read when they are written."""

    ranks: Communicator
    tensors: tuple[PlacedTensor, ...]
    own: tuple[OwnPart, ...]

    @property
    def size_bytes(self) -> int:
        """The size of a segment."""
        return self.tensors[-1].offset_bytes + self.tensors[-1].size_bytes if self.tensors else 0


def convert(
    state: TrainedState, ranks: Communicator | None = None, engine_layout: Layout | None = None, draft: TrainedState | None = None
) -> ConvertedWeights:
    """Names and places every part of the weights that training changes and engines have. Every one of ``ranks`` calls it, which hold all of them together
    (``None``: the ranks of the replica). Copies and gathers no weights. ``engine_layout``: of the matrices that engines multiply with, if they compute with
    the published ones (``None``: they do not): what they stack is placed one behind the other, and written in that layout, where the ranks' parts allow it.
    ``draft``: of a draft head that is trained beside the model, and published with it under the prefix ``PUBLISHED``.

    Raises ``RunError`` on every rank if a parameter of the Hugging Face form is missing, unexpected or has another shape: such weights
    would leave a part of the engine unchanged.
    """
    shapes = state.replica.model.shapes
    order, shards, trouble = dict(published_parameters(shapes)), list[WeightShard](), None
    own = {name for name, _ in trained_parameters(shapes)} - order.keys()
    try:
        shards = [shard for shard in state.weight_shards() if shard.name not in own]
    except (RuntimeError, RunError) as error:
        trouble = str(error).splitlines()[0]
    if draft is not None:
        order |= {f"{PUBLISHED}{name}": shape for name, shape in trained_parameters(draft.replica.model.shapes)}
        shards += [shard._replace(name=f"{PUBLISHED}{shard.name}") for shard in draft.weight_shards()]
    names = STANDARD_NAMES if shapes.experts is None else shapes.experts.names
    converted = place_shards(ranks or state.replica.ranks.world, shards, list(order), trouble, engine_layout, names)
    for tensor in converted.tensors:
        shape = order.pop(tensor.name, None)
        if shape != tensor.shape:
            raise RunError(f"the weights' conversion gives '{tensor.name}' as {list(tensor.shape)}; the architecture has {shape}")
    if order:
        raise RunError(f"the weights' conversion is missing '{next(iter(order))}' and {len(order) - 1} more tensors")
    return converted


def place_shards(
    ranks: Communicator, shards: Sequence[WeightShard], order: Sequence[str] = (), trouble: str | None = None,
    engine_layout: Layout | None = None, experts: ExpertNames = STANDARD_NAMES,
) -> ConvertedWeights:  # fmt: skip
    """Assigns each part of the shards of ``ranks`` to one owner and a location in a segment; tensors in the ``order`` of their names, then
    others. Every rank calls it; ``trouble``: why this rank cannot take part; ``engine_layout``: as in ``convert``; ``experts``: the names
    of their matrices. Raises ``RunError`` on every
    rank if one has trouble, or if the parts of a tensor are incomplete."""
    owned = _owners(_gathered(ranks, shards, trouble))
    stacks = [stacks for stacks in stacks_of(order, experts) if _are_stackable(owned, stacks, engine_layout)] if engine_layout is not None else []
    runs = [[name for stack in each for name in stack] for each in stacks]
    in_panels = {name for run in runs for name in run} if engine_layout == "panels" else set[str]()
    tensors = tuple(_placed(owned, stacked_order(order, runs), in_panels))
    for tensor in tensors:
        if not are_partition(tensor.shape, [part.offsets for part in tensor.parts]):
            raise RunError(f"the weights' conversion is missing a part of '{tensor.name}' {list(tensor.shape)}, which no rank has")
    held: dict[str, list[WeightShard]] = {}
    for shard in shards:
        held.setdefault(shard.name, []).append(shard)
    own = []
    for i, tensor in enumerate(tensors):
        for j, part in enumerate(tensor.parts):
            if part.owner == ranks.rank:
                size, shard = part.offsets.numel * DTYPE_BYTES[tensor.dtype], _holder(part.offsets, held[tensor.name])
                own.append(OwnPart(i, j, size, shard, None if shard.offsets == part.offsets else part.offsets.within(shard.offsets)))
    return ConvertedWeights(ranks, tensors, tuple(own))


def _holder(offsets: ShardOffsets, shards: Sequence[WeightShard]) -> WeightShard:
    """Returns the shard that contains ``offsets``."""
    return next(shard for shard in shards if shard.offsets == offsets or intersection(shard.offsets, offsets) == offsets)


def _gathered(ranks: Communicator, shards: Sequence[WeightShard], trouble: str | None) -> list[list[Piece]]:
    """Returns every rank's pieces, by rank."""
    if ranks.size == 1 and trouble is None:
        return [[Piece(Key(WEIGHTS, s.name), s.whole, s.offsets, dtype_name(s.dtype)) for s in shards]]
    told = [[s.name, dtype_name(s.dtype), s.whole, *s.offsets] for s in shards]
    return [
        [
            Piece(Key(WEIGHTS, name), tuple(whole), ShardOffsets(tuple(start), tuple(stop)), dtype)
            for name, dtype, whole, start, stop in pieces
        ]
        for pieces in vote(ranks, "the weights are not converted", trouble, told)
    ]


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype: ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


class _Owned(NamedTuple):
    whole: tuple[int, ...]
    dtype: str
    parts: list[tuple[ShardOffsets, int]]


def _owners(everyone: Sequence[Sequence[Piece]]) -> dict[str, _Owned]:
    """Returns the parts of every tensor and the rank that owns each, by name. Parts that overlap partially, as runs of the same norm do if
    tensor-parallel ranks partition flat buffers of different lengths, are reduced to what earlier owners leave."""
    owned_by_name: dict[str, _Owned] = {}
    chosen = [None] if len(everyone) == 1 else divide(everyone)
    for rank, (pieces, own) in enumerate(zip(everyone, chosen, strict=True)):
        for key, whole, offsets, dtype in pieces:
            if own is None or (key, offsets) in own:
                owned = owned_by_name.get(key.name)
                if owned is None:
                    owned_by_name[key.name] = owned = _Owned(whole, dtype, [])
                elif (owned.whole, owned.dtype) != (whole, dtype):
                    raise RunError(f"rank {rank} holds '{key.name}' as {dtype} {list(whole)}, others as {owned.dtype} {list(owned.whole)}")
                owned.parts.append((offsets, rank))
    for owned in owned_by_name.values():
        if len(owned.parts) > 1 and sum(offsets.numel for offsets, _ in owned.parts) > math.prod(owned.whole):
            owned.parts[:] = _disjoint(owned.parts)
    return owned_by_name


def _disjoint(parts: Sequence[tuple[ShardOffsets, int]]) -> list[tuple[ShardOffsets, int]]:
    taken: list[tuple[ShardOffsets, int]] = []
    for offsets, rank in sorted(parts):
        left = [offsets]
        for before, _ in taken:
            left = [rest for part in left for rest in difference(part, before)]
        taken += [(rest, rank) for rest in left]
    return taken


def _are_stackable(owned: dict[str, _Owned], stacks: Stacks, layout: Layout) -> bool:
    """Returns whether every matrix of ``stacks`` can be written in ``layout``, and all of them together, one behind the other, are the stacks in it."""
    if not stacks or not all(name in owned for stack in stacks for name in stack):
        return False
    own = [[owned[name] for name in stack] for stack in stacks]
    every = [o for stack in own for o in stack]
    if layout == "rows":
        return is_stackable_in_rows([o.whole for o in every], DTYPE_BYTES[every[0].dtype], ALIGNMENT_BYTES) and len({o.dtype for o in every}) == 1
    are_in_panels = all(is_in_panels(o.dtype, o.whole, [offsets for offsets, _ in o.parts]) for o in every)
    return are_in_panels and all(is_stackable([o.whole for o in stack]) for stack in own)


def _placed(owned: dict[str, _Owned], order: Sequence[str], in_panels: Collection[str]) -> list[PlacedTensor]:
    rank_of = {name: place for place, name in enumerate(order)}
    names = sorted(owned, key=lambda name: rank_of.get(name, len(rank_of)))
    dtypes = [owned[name].dtype for name in names]
    sizes = [math.prod(owned[name].whole) * DTYPE_BYTES[dtype] for name, dtype in zip(names, dtypes, strict=True)]
    placed = []
    for name, dtype, size, offset in zip(names, dtypes, sizes, place(sizes), strict=True):
        at, parts = offset, []
        for offsets, rank in sorted(owned[name].parts):
            parts.append(Part(rank, offsets, at))
            at += offsets.numel * DTYPE_BYTES[dtype]
        placed.append(PlacedTensor(name, dtype, owned[name].whole, offset, size, tuple(parts), "panels" if name in in_panels else "rows"))
    return placed
