"""Batches with several low-rank adapters (Hu et al., 2021).

Adapters are loaded into *slots*. Each adapted matrix has two stacks of small matrices, one for each slot, padded with zeros to the maximum
rank: the rows of a batch are sorted by slot and multiplied with both stacks (Punica; Chen et al., 2023). A row's bits depend on its own
adapter only, and rows without one are not changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.kernels.api import Kernels, PackedGroups
from tandem.layout.linear_attention import OUTPUT, PROJECTIONS
from tandem.layout.parameters import matrix_name, parameters
from tandem.layout.shapes import ModelShapes
from tandem.layout.sharding import WHOLE, ShardSpec, shard_slices
from tandem.model.layer import STACKED

ALONE = (("q_a_proj",), ("q_b_proj",), ("kv_a_proj_with_mqa",), *((name,) for name in PROJECTIONS))
"""The matrices of latent and of linear attention that are multiplied as others are."""
ANY_LAYER = -1
"""The layer of the linear layers of a module of transformers, whose names say where they are."""
_PARTS = (STACKED[0], (*STACKED[1], OUTPUT), *STACKED[2:], *ALONE)
"""The matrices of each field of ``LoraLayer``: those of them that a layer has."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """``matrices[layer, "q_proj"]``: (A [r, K], B [N, r] times the scale alpha / r, or alpha / sqrt(r) if it is rank-stabilised). For a module of
    transformers ``matrices[ANY_LAYER, name]``, by the name of the linear layer. ``digest`` covers every byte of the folder's two files."""

    rank: int
    matrices: dict[tuple[int, str], tuple[Tensor, Tensor]]
    digest: str


class LowRank(NamedTuple):
    """The two stacks of one matrix: ``first`` [S, P, K] and ``second`` [S, N, P], packed, for S slots. A fused matrix has a share of P for
    each of its parts, and ``second`` is zero where a part meets another part's share."""

    first: PackedGroups
    second: PackedGroups


class LoraLayer(NamedTuple):
    """The adapters' updates in one layer; ``None`` if no slot adapts the matrix."""

    qkv: LowRank | None = None
    output: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None
    q_a: LowRank | None = None
    q_b: LowRank | None = None
    kv_a: LowRank | None = None
    qkvz: LowRank | None = None
    ba: LowRank | None = None


class AdapterStacks(NamedTuple):
    """The adapters' updates of every layer, or of a module of transformers by the names of its linear layers."""

    layers: list[LoraLayer]
    linears: dict[str, LowRank]


class LoraBatch(NamedTuple):
    """The rows [R] int64 of a flat batch that have an adapter, sorted by slot: slot s has ``rows[bounds[s]:bounds[s + 1]]`` (int64 [S +
    1])."""

    stacks: AdapterStacks
    rows: Tensor
    bounds: Tensor


def lora_batch(stacks: AdapterStacks, slots: Tensor, count: int) -> LoraBatch | None:
    """Returns the batch for the slot of every token (``slots[T]`` int64, -1: no adapter), of ``count`` slots; ``None`` if no token has an
    adapter."""
    order = slots.argsort(stable=True)
    bounds = torch.searchsorted(slots[order], torch.arange(count + 1))
    if bounds[0] == len(slots):
        return None
    return LoraBatch(stacks, order[bounds[0] :], bounds - bounds[0])


def stack(
    adapters: Sequence[Adapter | None], shapes: ModelShapes, kernels: Kernels, max_rank: int, like: Tensor, shard_spec: ShardSpec = WHOLE
) -> AdapterStacks:
    """Returns the stacks for ``adapters`` in their slots (``None``: a free slot), in the dtype and on the device of ``like``.
    ``shard_spec``: returns what the rank with this shard spec needs."""
    if shapes.transformers is not None:
        linears = {}
        for name in shapes.transformers.linears:
            if any(adapter is not None and (ANY_LAYER, name) in adapter.matrices for adapter in adapters):
                held = [shard_slices(shapes, f"{name}.weight", shapes.transformers.shape_of(f"{name}.weight"), shard_spec)]
                linears[name] = _low_rank(adapters, ANY_LAYER, (name,), held, kernels, max_rank, like)
        return AdapterStacks([], linears)
    layers, whole = [], dict(parameters(shapes))
    for layer in range(shapes.num_hidden_layers):
        fused = {}
        for name, stacked in zip(LoraLayer._fields, _PARTS, strict=True):
            parts = tuple(part for part in stacked if f"{matrix_name(layer, part)}.weight" in whole)
            if any(adapter is not None and (layer, part) in adapter.matrices for adapter in adapters for part in parts):
                names = [f"{matrix_name(layer, part)}.weight" for part in parts]
                held = [shard_slices(shapes, name, whole[name], shard_spec) for name in names]
                fused[name] = _low_rank(adapters, layer, parts, held, kernels, max_rank, like)
        layers.append(LoraLayer(**fused))
    return AdapterStacks(layers, {})


def _low_rank(
    adapters: Sequence[Adapter | None], layer: int, parts: Sequence[str], held: Sequence[tuple[slice, ...]], kernels: Kernels, max_rank: int,
    like: Tensor,
) -> LowRank:
    """``held[i]``: the rows and the columns of the matrix of part i that this rank holds."""
    sizes = [rows.stop - rows.start for rows, _ in held]
    first = like.new_zeros(len(adapters), len(parts) * max_rank, held[0][1].stop - held[0][1].start)
    second = like.new_zeros(len(adapters), sum(sizes), len(parts) * max_rank)
    for slot, adapter in enumerate(adapters):
        row = 0
        for i, part in enumerate(parts):
            if adapter is not None and (layer, part) in adapter.matrices:
                a, b = adapter.matrices[layer, part]
                share = slice(i * max_rank, i * max_rank + adapter.rank)
                first[slot, share] = a[:, held[i][1]].to(like)
                second[slot, row : row + sizes[i], share] = b[held[i][0]].to(like)
            row += sizes[i]
    return LowRank(kernels.pack_groups(first), kernels.pack_groups(second))


def add_lora(kernels: Kernels, out: Tensor, x: Tensor, low_rank: LowRank | None, batch: LoraBatch) -> Tensor:
    """Adds ``x A^T B^T`` to ``out[T, N]`` in place, for the rows that have an adapter; ``x[T, K]``. No gradient."""
    if low_rank is None:
        return out
    multiply: Any = kernels.grouped_linear_packed
    inner = multiply(x.index_select(0, batch.rows), low_rank.first, batch.bounds)
    return out.index_add_(0, batch.rows, multiply(inner, low_rank.second, batch.bounds))
