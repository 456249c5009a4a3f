"""The attention of one layer: over packed sequences in the trainer, over the paged cache in the engine."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.kernels.api import Kernels, KVLayer, PagedBatch
from tandem.model.parallel.context_parallel import SharedContext, shared_attention


@dataclass(frozen=True, slots=True)
class PackedContext:
    """Whole sequences one after another: sequence s is rows ``cu_seqlens[s]:cu_seqlens[s + 1]`` (int32), and its positions start
    at 0. ``max_seqlen``: the longest, in tokens."""

    cu_seqlens: Tensor
    max_seqlen: int


@dataclass(frozen=True, slots=True)
class PagedContext:
    """An engine's flat batch over its cache, one ``KVLayer`` a layer. Keys and values of the new tokens are written.
    ``wanted[W]`` int64: the rows whose hidden state is returned (``None``: all). The last layer computes only keys and
    values of the others."""

    batch: PagedBatch
    caches: list[KVLayer]
    wanted: Tensor | None = None


AttentionContext = PackedContext | PagedContext


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What attention needs of layer ``index``. ``heads`` is (query heads, key-value heads, head size); ``window`` in
    tokens (``None``: all before); ``q_norm`` and ``k_norm`` [D] where the architecture has them."""

    index: int
    heads: tuple[int, int, int]
    scale: float
    window: int | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


def attend(
    kernels: Kernels, layer: AttentionLayer, qkv: Tensor, positions: Tensor, cos_sin: Tensor, context: AttentionContext | SharedContext,
    kv_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rotate and attend: ``qkv[T, (Hq + 2 Hkv) D]`` -> [T, Hq D]. ``kv_dtype``: packed keys and values are rounded as a
    cache of this dtype would; a paged one has its own."""
    if isinstance(context, PagedContext):
        cache = context.caches[layer.index]
        q = kernels.rope_to_cache(
            qkv, positions, cos_sin, layer.heads, layer.q_norm, layer.k_norm, layer.eps, cache, context.batch.slots
        )
        mixed = kernels.paged_attention(q, cache, context.batch, layer.scale, layer.window)
    else:
        q, k, v = kernels.rope(qkv, positions, cos_sin, layer.heads, layer.q_norm, layer.k_norm, layer.eps)
        # fp32 holds what mixed precision computes with as it is.
        if kv_dtype is not None and kv_dtype not in (qkv.dtype, torch.float32):
            k, v = kernels.round_kv(k, kv_dtype), kernels.round_kv(v, kv_dtype)
        if isinstance(context, SharedContext):
            mixed = shared_attention(kernels, q, k, v, context, layer.scale, layer.window)
        else:
            mixed = kernels.packed_attention(q, k, v, context.cu_seqlens, context.max_seqlen, layer.scale, layer.window)
    return mixed.flatten(1)
