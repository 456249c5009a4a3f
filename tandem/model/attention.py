"""The attention of one layer: over packed sequences in the trainer, over the paged KV cache in the engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.api import CacheLayer, Kernels, KVLayer, PagedBatch
from tandem.kernels.trained_layers import Beginnings
from tandem.model.parallel.context_parallel import SharedContext, shared_attention
from tandem.model.shared_prompts import SharedPrompts, gathered_rows_of


@dataclass(frozen=True, slots=True)
class PackedContext:
    """Concatenated whole sequences: sequence s is rows ``cu_seqlens[s]:cu_seqlens[s + 1]`` (int32), and its positions start at 0.
    ``max_seqlen``: the longest, in tokens. ``prompts``: where sequences share their prompts; ``cu_seqlens`` then marks the keys of each.
    ``routed_experts[T, layers, k]``: of a mixture of experts, those that each token is sent to in every layer of the model (``None``: its routers choose).
    ``wanted[W]`` int64: as of a ``PagedContext``, on ranks that have all rows of their batch. ``beginnings``: what the sequences begin with in common, of a
    batch that has all of their tokens (``None``: not known)."""

    cu_seqlens: Tensor
    max_seqlen: int
    prompts: SharedPrompts | None = None
    routed_experts: Tensor | None = None
    wanted: Tensor | None = None
    beginnings: Beginnings | None = None


@dataclass(frozen=True, slots=True)
class PagedContext:
    """An engine's flat batch and its KV cache, one entry per layer. Keys and values of the new tokens are written to the cache.
    ``wanted[W]`` int64: the rows whose hidden state is returned (``None``: all); of the other rows the last layer computes its attention
    and nothing behind it."""

    batch: PagedBatch
    caches: Sequence[CacheLayer]
    wanted: Tensor | None = None


AttentionContext = PackedContext | PagedContext


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The inputs of attention that belong to layer ``index``. ``heads``: (query heads, key-value heads, head size); ``window`` in tokens
    (``None``: full causal attention); ``q_norm`` and ``k_norm`` [D] if the architecture has them, or with ``norms_apart``, which are computed before the call
    that rotates, [Hq D] and [Hkv D] of all heads together, or [Hq, D] and [Hkv, D] with weights for each.
    ``rotation``: the index of its rotation in the batch's (see ``rotations``). ``cap``: the soft cap of the scores (``None``: without). ``sinks``: the
    scores [Hq] of its sinks, if it has them. ``centred_norms``: the
    layer's norms subtract the mean first. ``gated``: the outputs of heads are multiplied with the sigmoid of gates."""

    index: int
    heads: tuple[int, int, int]
    scale: float
    window: int | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    norms_apart: bool = False
    rotation: int = 0
    cap: float | None = None
    sinks: Tensor | None = None
    centred_norms: bool = False
    gated: bool = False


class Rotation(NamedTuple):
    """The rows ``positions[T]`` of the table ``cos_sin[P, D]`` that a batch's queries and keys are rotated by, with the columns in ``order`` (``None``: as they
    are)."""

    positions: Tensor
    cos_sin: Tensor
    order: Tensor | None = None


def rotations(positions: Tensor, tables: tuple[Tensor, ...], order: Tensor | None) -> tuple[Rotation, ...]:
    """Returns the rotations of a batch at ``positions[T]`` by each of ``model.rotary.rotary_tables``, in the ``model.rotary.rotary_order``."""
    return tuple(Rotation(positions if len(table) > 1 else torch.zeros_like(positions), table, order) for table in tables)


def attend(
    kernels: Kernels, layer: AttentionLayer, qkv: Tensor, rotation: Rotation, context: AttentionContext | SharedContext, kv_dtype: torch.dtype | None = None
) -> Tensor:
    """Applies norms of queries and keys, rotary embedding and attention: ``qkv[T, (Hq + 2 Hkv) D]``, or with gates ``[T, 2 (Hq + Hkv) D]`` -> [T, Hq D].
    ``kv_dtype``: packed keys and values are rounded as a KV cache of this dtype would; a paged cache has its own dtype."""
    positions, cos_sin, order = rotation
    q_norm, k_norm, gates = layer.q_norm, layer.k_norm, None
    if layer.gated:
        qkv, gates = _without_gates(layer, qkv)
    if layer.norms_apart:
        qkv, q_norm, k_norm = _normalised(kernels, layer, qkv), None, None
    if order is not None:
        qkv, of_head = qkv.index_select(1, order), order[: layer.heads[2]]
        q_norm, k_norm = (None if norm is None else norm.index_select(0, of_head) for norm in (q_norm, k_norm))
    if isinstance(context, PagedContext):
        cache = context.caches[layer.index]
        assert isinstance(cache, KVLayer)
        q = kernels.rope_to_cache(
            qkv, positions, cos_sin, layer.heads, q_norm, k_norm, layer.eps, cache, context.batch.slots
        )
        mixed = kernels.paged_attention(q, cache, context.batch, layer.scale, layer.window, layer.cap, layer.sinks)
    else:
        q, k, v = kernels.rope(qkv, positions, cos_sin, layer.heads, q_norm, k_norm, layer.eps)
        mixed = attend_packed(kernels, layer, q, k, v, context, kv_dtype)
    mixed = mixed.flatten(1)
    return mixed if gates is None else (mixed * logistic(gates)).to(mixed.dtype)


def _without_gates(layer: AttentionLayer, qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``qkv`` without the gates [T, Hq D], which are behind the query of each head, and the gates."""
    heads, kv_heads, size = layer.heads
    both, kv = qkv.split([2 * heads * size, 2 * kv_heads * size], dim=1)
    q, gates = both.view(-1, heads, 2, size).unbind(2)
    return torch.cat((q.flatten(1), kv), dim=1), gates.flatten(1)


def logistic(x: Tensor) -> Tensor:
    """Returns the sigmoid of ``x`` in at least fp32. torch's own gives the last elements of a tensor other bits than the others; below -80 its value is 0 and
    its slope too."""
    bounded = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous().clamp_min(-80.0)
    return 1.0 / (1.0 + torch.exp(-bounded))


def attend_packed(
    kernels: Kernels, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor | None, context: PackedContext | SharedContext,
    kv_dtype: torch.dtype | None = None, value_size: int = 0,
) -> Tensor:  # fmt: skip
    """Computes attention of the rotated ``q[T, Hq, D]`` over ``k`` and ``v`` of packed sequences -> [T, Hq, Dv]. ``v`` ``None``: the first ``value_size``
    numbers of each key, which a compressed cache has once."""
    # Mixed precision computes with 16-bit values, which fp32 represents exactly.
    if kv_dtype is not None and kv_dtype not in (k.dtype, torch.float32):
        k, v = kernels.round_kv(k, kv_dtype), None if v is None else kernels.round_kv(v, kv_dtype)
    v = k[..., :value_size].contiguous() if v is None else v
    if isinstance(context, SharedContext):
        return shared_attention(kernels, q, k, v, context, layer.scale, layer.window, layer.cap, layer.sinks)
    if context.prompts is not None:
        k, v = (gathered_rows_of(x, context.prompts) for x in (k, v))
        query_start = context.prompts.query_start
        return kernels.packed_attention(q, k, v, context.cu_seqlens, context.max_seqlen, layer.scale, layer.window, query_start, layer.cap, layer.sinks)
    return kernels.packed_attention(q, k, v, context.cu_seqlens, context.max_seqlen, layer.scale, layer.window, cap=layer.cap, sinks=layer.sinks)


def _normalised(kernels: Kernels, layer: AttentionLayer, qkv: Tensor) -> Tensor:
    """Returns ``qkv`` with normalised queries and keys: of all heads together, or each with the weights of its head."""
    assert layer.q_norm is not None and layer.k_norm is not None
    query_heads, kv_heads, size = layer.heads
    q, k, v = qkv.split([query_heads * size, kv_heads * size, kv_heads * size], dim=1)
    of_heads = lambda x, norm: kernels.rms_norm(x.reshape(-1, norm.shape[-1]), norm, layer.eps, layer.centred_norms).view(x.shape)
    return torch.cat((of_heads(q, layer.q_norm), of_heads(k, layer.k_norm), v), dim=1)
