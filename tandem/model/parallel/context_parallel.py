"""Attention over tokens that are sharded over context-parallel ranks.

If the number of query heads is divisible by the number of ranks, an all-to-all gives each rank all tokens of some heads, and another
returns the results (DeepSpeed-Ulysses; Jacobs et al., 2023): the attention, and hence its bits, are those of a single rank. Key-value heads
shared by several ranks' queries are sent to each of them. Otherwise keys and values are gathered, and each rank attends for its own tokens.
"""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.api import Kernels
from tandem.model.parallel.collective_ops import exchanged, gathered_runs
from tandem.runtime.collectives.communicator import Communicator


@dataclass(frozen=True, slots=True)
class SharedContext:
    """A ``PackedContext`` of which each rank has a run of ``counts[rank]`` tokens; ``cu_seqlens`` and ``max_seqlen`` are of all tokens."""

    cu_seqlens: Tensor
    max_seqlen: int
    ranks: Communicator
    counts: tuple[int, ...]


def shared_attention(
    kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, context: SharedContext, scale: float, window: int | None, cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Computes attention: ``q[t, Hq, D]``, ``k, v[t, Hkv, D]`` of this rank's t tokens, with rotary embedding applied -> [t, Hq, D]."""
    if q.shape[1] % context.ranks.size:
        return _over_gathered_keys(kernels, q, k, v, context, scale, window, cap, sinks)
    return _over_heads(kernels, q, k, v, context, scale, window, cap, sinks)


def _over_heads(
    kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, context: SharedContext, scale: float, window: int | None, cap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    ranks, counts, tokens, value_size = context.ranks, context.counts, len(q), v.shape[2]
    v = _as_wide(v, q.shape[2])
    heads = q.shape[1] // ranks.size
    chosen = _key_value_heads(q.shape[1], k.shape[1], ranks.size, q.device)
    here = [tokens] * ranks.size
    parts = torch.cat((q.unflatten(1, (ranks.size, heads)), k[:, chosen], v[:, chosen]), dim=2).transpose(0, 1).flatten(0, 1)
    arrived = exchanged(parts, here, counts, ranks, "tokens for heads")
    pairs = chosen.shape[1]
    own_q, own_k, own_v = (part.contiguous() for part in arrived.split([heads, pairs, pairs], dim=1))
    own_v = own_v[..., :value_size].contiguous()
    # The gradient of the others' sinks is 0 here.
    own_sinks = None if sinks is None else sinks.view(ranks.size, heads)[ranks.rank]
    mixed = kernels.packed_attention(own_q, own_k, own_v, context.cu_seqlens, context.max_seqlen, scale, window, cap=cap, sinks=own_sinks)
    back = exchanged(mixed.contiguous(), counts, here, ranks, "heads for tokens")
    return back.view(ranks.size, tokens, heads, value_size).transpose(0, 1).flatten(1, 2)


def _as_wide(v: Tensor, size: int) -> Tensor:
    """Returns values with zeros behind them where keys have more numbers, so that both are sent at once."""
    return v if v.shape[2] == size else F.pad(v, (0, size - v.shape[2]))


def _key_value_heads(query_heads: int, key_value_heads: int, ranks: int, device: torch.device) -> Tensor:
    """Returns the key-value heads that each rank's queries attend to: [ranks, n] int64."""
    seen = torch.arange(query_heads, device=device) // (query_heads // key_value_heads)
    each, shared = query_heads // ranks, query_heads // key_value_heads
    if each % shared == 0 or shared % each == 0:
        return seen.view(ranks, each)[:, :: min(shared, each)]
    # A rank's queries begin within a group, so each query takes its own copy.
    return seen.view(ranks, each)


def _over_gathered_keys(
    kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, context: SharedContext, scale: float, window: int | None, cap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    ranks, counts = context.ranks, context.counts
    value_size = v.shape[2]
    pairs = gathered_runs(torch.cat((k, _as_wide(v, k.shape[2])), dim=1), counts, ranks, "keys and values")
    first = sum(counts[: ranks.rank])
    last = first + len(q)
    if first == last:
        # Its gradient is 0, but it must take part in the other ranks' collectives.
        return q[..., :value_size] + 0 * pairs[:0].sum() + (0 if sinks is None else 0 * sinks.sum())
    bounds = context.cu_seqlens.tolist()
    starts = [start for start, end in itertools.pairwise(bounds) if start < last and end > first]
    begin = starts[0]
    seen_k, seen_v = (part.contiguous() for part in pairs[begin:last].chunk(2, dim=1))
    seen_v = seen_v[..., :value_size].contiguous()
    # Zero rows replace the queries before this rank's, because the kernels attend over whole sequences.
    queries = F.pad(q, (0, 0, 0, 0, first - begin, 0))
    edges = [*starts, last]
    cu_seqlens = context.cu_seqlens.new_tensor([edge - begin for edge in edges])
    longest = max(after - before for before, after in itertools.pairwise(edges))
    mixed = kernels.packed_attention(queries, seen_k, seen_v, cu_seqlens, longest, scale, window, cap=cap, sinks=sinks)
    return mixed[first - begin :]
