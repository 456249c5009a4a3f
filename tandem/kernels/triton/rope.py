"""Launches rotary embedding."""

import torch
from torch import Tensor

from tandem.kernels.api import KVLayer
from tandem.kernels.triton.launch import KV_CODES, UNFUSED, check, dense, power_of_two
from tandem.kernels.triton.programs import rope as programs

_HEADS_AT_ONCE = 16


def rope(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int], q_norm: Tensor | None, k_norm: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs ``Kernels.rope``."""
    k, v = (qkv.new_empty(len(qkv), *heads[1:]) for _ in range(2))
    q = _launch(qkv, positions, cos_sin, heads, q_norm, k_norm, eps, KVLayer(k, v), None)
    return q, k, v


def rope_to_cache(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int], q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
    cache: KVLayer, slots: Tensor,
) -> Tensor:  # fmt: skip
    """Runs ``Kernels.rope_to_cache``."""
    return _launch(qkv, positions, cos_sin, heads, q_norm, k_norm, eps, cache, slots)


def _launch(
    qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int], q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
    to: KVLayer, slots: Tensor | None,
) -> Tensor:  # fmt: skip
    query_heads, kv_heads, size = heads
    all_heads = query_heads + 2 * kv_heads
    check("rope qkv", qkv, None, all_heads * size)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("rope has a norm for only one of queries and keys; give both or neither")
    qkv = dense(qkv)
    q = qkv.new_empty(len(qkv), query_heads, size)
    if not len(qkv):
        return q
    keys, values = (x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for x in (to.keys, to.values))
    block = min(_HEADS_AT_ONCE, power_of_two(all_heads))
    programs.rope[(len(qkv), -(-all_heads // block))](
        qkv, positions, cos_sin, qkv if q_norm is None else dense(q_norm), qkv if k_norm is None else dense(k_norm), q, keys, values,
        keys if to.key_scales is None else to.key_scales, values if to.value_scales is None else to.value_scales,
        positions if slots is None else slots, eps, query_heads, kv_heads,
        HAS_NORM=q_norm is not None, TO_CACHE=slots is not None, CODES=KV_CODES.get(to.keys.dtype, 0), D=size, BLOCK_H=block,
        HALF=power_of_two(size // 2), num_warps=4, **UNFUSED,
    )  # fmt: skip
    return q
