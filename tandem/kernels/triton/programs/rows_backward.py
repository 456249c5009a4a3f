"""Gradients of norms, of the gate and of rotary embedding. Each output is summed by one program in order, without atomic addition."""

import triton
import triton.language as tl

from tandem.kernels.triton.programs.common import ALPHA, GELU, LIMIT, SWIGLU, gelu_inner, heads_of_token, rotation, swiglu_bounds


@triton.jit
def rms_norm_backward(
    grad, grad_total, total, weight, grad_y, grad_x, partial, rows, width, groups, eps, programs,
    ADDS: tl.constexpr, CENTRED: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes the gradient by y = ``total[T, H]`` of ``weight[t % groups] * y / sqrt(mean(y^2) + eps)``, with ``CENTRED`` of y minus its mean, whose
    output gradient is ``grad[T, H]``; with ``ADDS`` plus ``grad_total``. Written to ``grad_y``, and with ``NARROW`` in its dtype to ``grad_x``.
    ``partial[programs, H]`` fp32 receives each program's sum over its rows of the gradient by ``weight``. Grid: (programs,), each of which processes every
    ``programs``-th row, ``programs`` a multiple of ``groups``."""
    first = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < width
    scale = tl.load(weight + first % groups * width + at, mask=mask, other=0).to(tl.float32)
    by_weight = tl.zeros((BLOCK,), tl.float32)
    row = first.to(tl.int64)
    for _ in range(first, rows, programs):
        place = row * width + at
        y = tl.load(total + place, mask=mask, other=0).to(tl.float32)
        g = tl.load(grad + place, mask=mask, other=0).to(tl.float32)
        if CENTRED:
            y = tl.where(mask, y - tl.sum(y, 0) / width, 0.0)
        rstd = 1.0 / tl.sqrt_rn(tl.sum(y * y, 0) / width + eps)
        normed = y * rstd
        by_weight += g * normed
        scaled = g * scale
        grad_of_y = rstd * (scaled - normed * (tl.sum(scaled * normed, 0) / width))
        if CENTRED:
            grad_of_y = tl.where(mask, grad_of_y, 0.0)
            grad_of_y -= tl.sum(grad_of_y, 0) / width
        if ADDS:
            grad_of_y += tl.load(grad_total + place, mask=mask, other=0).to(tl.float32)
        tl.store(grad_y + place, grad_of_y.to(grad_y.dtype.element_ty), mask=mask)
        if NARROW:
            tl.store(grad_x + place, grad_of_y.to(grad_x.dtype.element_ty), mask=mask)
        row += programs
    tl.store(partial + first * width + at, by_weight, mask=mask)


@triton.jit
def gate_mul_backward(grad, gate_up, grad_gate_up, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Computes the gradient by ``gate_up[T, 2 F]`` of ``gate_mul``, whose output gradient is ``grad[T, F]``. Grid: (T, tiles of F)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=mask, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=mask, other=0).to(tl.float32)
    g = tl.load(grad + row * width + at, mask=mask, other=0).to(tl.float32)
    of_gate, of_up = g, g
    if KIND == SWIGLU:
        of_gate = tl.where(gate > LIMIT, 0.0, g)
        of_up = tl.where(tl.abs(up) > LIMIT, 0.0, g)
        gate, up = swiglu_bounds(gate, up, LIMIT)
        up = up + 1.0
    # x (1 + tanh(y)) / 2 is x sigmoid(2 y).
    inner = gelu_inner(gate) if KIND == GELU else gate * ALPHA if KIND == SWIGLU else gate
    sigmoid = 1.0 / (1.0 + tl.exp(-inner))
    reach = gate * (1.5957691216057308 + 0.2140644488 * gate * gate) if KIND == GELU else inner
    by_gate = of_gate * up * sigmoid * (1.0 + reach * (1.0 - sigmoid))
    tl.store(grad_gate_up + row * 2 * width + at, by_gate.to(grad_gate_up.dtype.element_ty), mask=mask)
    tl.store(grad_gate_up + row * 2 * width + width + at, (of_up * gate * sigmoid).to(grad_gate_up.dtype.element_ty), mask=mask)


@triton.jit
def rope_backward(
    grad_q, grad_k, grad_v, positions, cos_sin, grad_qkv, query_heads, kv_heads, D: tl.constexpr, BLOCK_H: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Computes the gradient by ``qkv[T, (Hq + 2 Hkv) D]``, without norms, from those by ``q[T, Hq, D]``, ``k`` and ``v`` [T, Hkv, D]:
    queries and keys are rotated back. Grid: (T, head tiles)."""
    token, heads, all_heads, is_query, is_key, is_value = heads_of_token(query_heads, kv_heads, BLOCK_H)
    h = tl.arange(0, HALF)
    in_half = h < D // 2
    key_head = heads - query_heads
    from_q = grad_q + (token * query_heads + heads)[:, None] * D + h[None, :]
    from_k = grad_k + (token * kv_heads + key_head)[:, None] * D + h[None, :]
    from_v = grad_v + (token * kv_heads + key_head - kv_heads)[:, None] * D + h[None, :]
    of_query = is_query[:, None] & in_half[None, :]
    of_key = is_key[:, None] & in_half[None, :]
    of_value = is_value[:, None] & in_half[None, :]
    first = tl.load(from_q, mask=of_query, other=0).to(tl.float32) + tl.load(from_k, mask=of_key, other=0).to(tl.float32)
    second = tl.load(from_q + D // 2, mask=of_query, other=0).to(tl.float32) + tl.load(from_k + D // 2, mask=of_key, other=0).to(tl.float32)
    cos, sin = rotation(positions, cos_sin, token, h, in_half, D)
    turned_first = first * cos + second * sin + tl.load(from_v, mask=of_value, other=0).to(tl.float32)
    turned_second = second * cos - first * sin + tl.load(from_v + D // 2, mask=of_value, other=0).to(tl.float32)
    to = grad_qkv + (token * all_heads + heads)[:, None] * D + h[None, :]
    is_inner = in_half[None, :] & (heads < all_heads)[:, None]
    tl.store(to, turned_first.to(grad_qkv.dtype.element_ty), mask=is_inner)
    tl.store(to + D // 2, turned_second.to(grad_qkv.dtype.element_ty), mask=is_inner)
