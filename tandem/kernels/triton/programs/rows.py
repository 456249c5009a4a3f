"""Programs over rows: norms and the gate of an MLP. Sums are fp32; their order is a function of the row's width."""

import triton
import triton.language as tl


@triton.jit
def rms_norm(x, residual, weight, out, total, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """Computes ``out = weight * y / sqrt(mean(y^2) + eps)`` of one row; y is the row of ``x[T, H]``, or with ``ADD`` ``x + residual``,
    rounded to its dtype and stored in ``total``. Grid: (T,)."""
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    mask = at < width
    y = tl.load(x + row + at, mask=mask, other=0).to(tl.float32)
    if ADD:
        y = (y + tl.load(residual + row + at, mask=mask, other=0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row + at, y, mask=mask)
        y = y.to(tl.float32)
    mean = tl.sum(y * y, 0) / width
    normed = y * (1.0 / tl.sqrt_rn(mean + eps))
    scale = tl.load(weight + at, mask=mask, other=0).to(tl.float32)
    tl.store(out + row + at, (scale * normed).to(out.dtype.element_ty), mask=mask)


@triton.jit
def silu_mul(gate_up, out, width, BLOCK: tl.constexpr):
    """Computes ``silu(gate_up[:, :F]) * gate_up[:, F:]``. Grid: (T, tiles of F)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=mask, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=mask, other=0).to(tl.float32)
    tl.store(out + row * width + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)
