"""Packed attention for the last queries of each sequence, by attention kernels that compute all of them."""

from collections.abc import Callable

from torch import Tensor, arange

PackedAttention = Callable[..., Tensor]


def attend_last(
    attention: PackedAttention, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int | None,
    query_start: Tensor, **further: float | Tensor | None,
) -> Tensor:
    """Returns ``Kernels.packed_attention`` with ``query_start``: zeros are put in the places of the queries that ``q`` does not have, and their results
    are dropped. ``further``: arguments of ``attention``, if it takes any."""
    lengths = query_start.diff().long()
    moved = (cu_seqlens[1:] - query_start[1:]).long().repeat_interleave(lengths, output_size=len(q))
    places = arange(len(q), device=q.device) + moved
    every = q.new_zeros(len(k), *q.shape[1:]).index_copy(0, places, q)
    return attention(every, k, v, cu_seqlens, max_seqlen, scale, window, **further).index_select(0, places)
