"""Programs over rows: norms and the gate of an MLP. Sums are fp32, their order is a function of the row's width."""

import triton
import triton.language as tl


@triton.jit
def rms_norm(x, residual, weight, out, total, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """``out = weight * y / sqrt(mean(y^2) + eps)`` of one row; y is the row of ``x[T, H]``, or with ``ADD`` ``x + residual``, rounded to its dtype and
    kept in ``total``. Grid: (T,)."""
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
    """``silu(gate_up[:, :F]) * gate_up[:, F:]``. Grid: (T, tiles of F)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=mask, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=mask, other=0).to(tl.float32)
    tl.store(out + row * width + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def logprobs(logits, targets, raw, scaled, entropy, width, temperature, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    """``log_softmax(logits[R, V])[target]`` of one row, with ``SCALED`` that of ``logits / temperature`` too, and the entropy of the one that is
    scaled. Grid: (R,). Sums go by blocks of ``BLOCK`` ids in order, each block's into one running number."""
    row = tl.program_id(0)
    own = logits + row.to(tl.int64) * width
    target = tl.load(targets + row)
    chosen = tl.load(own + target).to(tl.float32)
    largest = float("-inf")
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(own + at, mask=at < width, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, tl.max(x, 0))
    total = 0.0
    total_scaled = 0.0
    weighted = 0.0
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(own + at, mask=at < width, other=float("-inf")).to(tl.float32)
        total += tl.sum(tl.exp(x - largest), 0)
        distance = tl.div_rn(x - largest, temperature + tl.zeros_like(x))
        weight = tl.exp(distance)
        total_scaled += tl.sum(weight, 0)
        # A token of probability 0 has entropy 0, and not 0 * -inf.
        weighted += tl.sum(tl.where(weight > 0, weight * distance, 0.0), 0)
    tl.store(raw + row, chosen - largest - tl.log(total))
    if SCALED:
        log_total = tl.log(total_scaled)
        tl.store(scaled + row, tl.div_rn(chosen - largest, temperature) - log_total)
        tl.store(entropy + row, log_total - weighted / total_scaled)
