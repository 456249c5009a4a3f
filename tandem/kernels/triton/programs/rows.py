"""Programs over rows: norms, the gate of an MLP and soft caps. Sums are fp32; their order is a function of the row's width."""

import triton
import triton.language as tl

from tandem.kernels.triton.programs.common import ALPHA, GELU, LIMIT, SWIGLU, capped, gelu_inner, swiglu_bounds


@triton.jit
def rms_norm(x, residual, weight, out, total, width, groups, eps, ADD: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    """Computes ``out = weight[t % groups] * y / sqrt(mean(y^2) + eps)`` of one row; y is the row of ``x[T, H]``, or with ``ADD`` ``x + residual``,
    rounded to its dtype and stored in ``total``; with ``CENTRED`` minus its mean. Grid: (T,)."""
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    mask = at < width
    y = tl.load(x + row + at, mask=mask, other=0).to(tl.float32)
    if ADD:
        y = (y + tl.load(residual + row + at, mask=mask, other=0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row + at, y, mask=mask)
        y = y.to(tl.float32)
    if CENTRED:
        y = tl.where(mask, y - tl.sum(y, 0) / width, 0.0)
    mean = tl.sum(y * y, 0) / width
    normed = y * (1.0 / tl.sqrt_rn(mean + eps))
    scale = tl.load(weight + tl.program_id(0) % groups * width + at, mask=mask, other=0).to(tl.float32)
    tl.store(out + row + at, (scale * normed).to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate_mul(gate_up, out, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Computes ``silu(gate_up[:, :F]) * gate_up[:, F:]``, or by ``KIND`` GELU by tanh in its place, or the clamped SwiGLU. Grid: (T, tiles of F)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=mask, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=mask, other=0).to(tl.float32)
    if KIND == SWIGLU:
        gate, up = swiglu_bounds(gate, up, LIMIT)
        up = up + 1.0
    # x (1 + tanh(y)) / 2 is x sigmoid(2 y).
    inner = gelu_inner(gate) if KIND == GELU else gate * ALPHA if KIND == SWIGLU else gate
    tl.store(out + row * width + at, (gate / (1.0 + tl.exp(-inner)) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def soft_cap(x, out, width, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Computes ``CAP tanh(x[T, N] / CAP)``. Grid: (T, tiles of N)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    value = tl.load(x + row * width + at, mask=mask, other=0).to(tl.float32)
    tl.store(out + row * width + at, capped(value, CAP).to(out.dtype.element_ty), mask=mask)
