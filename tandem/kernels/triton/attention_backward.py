"""Launches the programs of attention's gradients."""

import torch
from torch import Tensor

from tandem.kernels.triton.attention import LOG2_E
from tandem.kernels.triton.launch import IS_INTERPRETED, UNFUSED, dense, power_of_two
from tandem.kernels.triton.programs import attention_backward as programs
from tandem.kernels.triton.tiles import Tiles


def packed(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_total: Tensor, cu_seqlens: Tensor, scale: float, window: int | None,
    cap: float | None, tiles: Tiles,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients by ``q[T, Hq, D]``, ``k`` and ``v`` [T, Hkv, D] of ``packed_attention``, whose output ``out`` has the gradient
    ``grad``. ``log_total``: from the forward pass."""
    q, k, v, grad = (dense(x) for x in (q, k, v, grad))
    tokens, query_heads, size = q.shape
    kv_heads, sequences = k.shape[1], len(cu_seqlens) - 1
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if not tokens or sequences < 1:
        return grads
    group = query_heads // kv_heads
    group_rows = power_of_two(group)
    rows, keys = max(tiles.backward, group_rows), tiles.backward
    inner = (out.float() * grad.float()).sum(-1)
    starts = cu_seqlens.to(q.device)
    shape = {
        "GROUP": group, "GROUP_ROWS": group_rows, "WINDOW": window or 0, "CAP": (cap or 0.0) * LOG2_E, "D": size, "BLOCK_M": rows, "BLOCK_N": keys,
        "BLOCK_D": max(16, power_of_two(size)), "WIDEN": IS_INTERPRETED, "num_warps": 8, "num_stages": 1, **UNFUSED,
    }  # fmt: skip
    sizes = sequences, query_heads, kv_heads, scale, scale * LOG2_E
    programs.attention_queries[(tokens // (rows // group_rows) + sequences, kv_heads)](
        q, k, v, grad, log_total, inner, starts, grads[0], *sizes, **shape
    )
    programs.attention_keys[(tokens // keys + sequences, kv_heads)](q, k, v, grad, log_total, inner, starts, *grads[1:], *sizes, **shape)
    return grads


def sinks(grad: Tensor, out: Tensor, log_total: Tensor, sinks: Tensor) -> Tensor:
    """Returns the gradient by ``sinks[Hq]``: minus the sum over tokens of the sink's share of the softmax times the output's dot product with
    its gradient."""
    inner = (out.float() * grad.float()).sum(-1)
    return -(torch.exp2(sinks.float() * LOG2_E - log_total) * inner).sum(0).to(sinks.dtype)
