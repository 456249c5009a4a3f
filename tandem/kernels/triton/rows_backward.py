"""Launches the gradients of norms, of the gate and of rotary embedding."""

import torch
from torch import Tensor

from tandem.kernels.triton.launch import UNFUSED, dense, power_of_two, processors
from tandem.kernels.triton.programs import rows_backward as programs
from tandem.kernels.triton.rows import KINDS
from tandem.layout.shapes import Activation

_PROGRAMS_A_PROCESSOR = 4
_HEADS_AT_ONCE = 16


def rms_norm(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, eps: float, centred: bool, x_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients (by y, by y in ``x_dtype``, by ``weight``) of the norm of y = ``total``. ``grad_total``: the gradient of y from
    other uses."""
    width = total.shape[-1]
    rows = total.numel() // width
    grad, total = dense(grad), dense(total)
    other = grad if grad_total is None else dense(grad_total)
    by_y = torch.empty_like(total)
    is_narrow = x_dtype != total.dtype
    by_x = torch.empty_like(total, dtype=x_dtype) if is_narrow else by_y
    groups = weight.numel() // width
    # A multiple of the groups, so that all rows of a program have the same weights.
    count = max(1, min(rows, _PROGRAMS_A_PROCESSOR * processors(total.device)) // groups) * groups
    partial = torch.zeros(count, width, dtype=torch.float32, device=total.device)
    if rows:
        block = power_of_two(width)
        programs.rms_norm_backward[(count,)](
            grad, other, total, dense(weight), by_y, by_x, partial, rows, width, groups, eps, count,
            ADDS=grad_total is not None, CENTRED=centred, NARROW=is_narrow, BLOCK=block, num_warps=max(1, min(16, block // 256)), **UNFUSED,
        )  # fmt: skip
    return by_y, by_x, partial.view(-1, *weight.shape).sum(0).to(weight.dtype)


def gate_mul(grad: Tensor, gate_up: Tensor, activation: Activation) -> Tensor:
    grad, gate_up = dense(grad), dense(gate_up)
    grad_gate_up, width = torch.empty_like(gate_up), gate_up.shape[1] // 2
    if grad_gate_up.numel():
        block = min(1024, power_of_two(width))
        programs.gate_mul_backward[(len(gate_up), -(-width // block))](
            grad, gate_up, grad_gate_up, width, KIND=KINDS[activation], BLOCK=block, num_warps=4, **UNFUSED
        )
    return grad_gate_up


def rope(
    grads: tuple[Tensor, Tensor, Tensor], positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int], dtype: torch.dtype
) -> Tensor:
    """Returns the gradient by ``qkv[T, (Hq + 2 Hkv) D]`` from those by q, k and v."""
    q, k, v = map(dense, grads)
    query_heads, kv_heads, size = heads
    all_heads = query_heads + 2 * kv_heads
    grad_qkv = torch.empty(len(q), all_heads * size, dtype=dtype, device=q.device)
    if len(q):
        block = min(_HEADS_AT_ONCE, power_of_two(all_heads))
        programs.rope_backward[(len(q), -(-all_heads // block))](
            q, k, v, positions, cos_sin, grad_qkv, query_heads, kv_heads, D=size, BLOCK_H=block, HALF=power_of_two(size // 2), num_warps=4, **UNFUSED
        )
    return grad_qkv
