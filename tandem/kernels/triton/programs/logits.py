"""Programs over rows of logits. A row is split into chunks of ids, each summed by a separate program; their results are combined in one
vector operation, whose order is a function of the vocabulary. One row therefore uses the whole device, and has the same bits in any
batch."""

import triton
import triton.language as tl


@triton.jit
def chunk_sums(logits, temperatures, largest, place, total, scaled, weighted, width, chunks, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    """Computes, for ids ``BLOCK c .. BLOCK (c + 1) - 1`` of a row of ``logits[R, V]``: the largest logit, the first id that has it, and
    relative to it the sum of weights; with ``SCALED`` also that at the row's temperature (0: 1), and the sum of weight times its logarithm.
    All are [R, chunks]. Grid: (R, chunks)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * width + at, mask=at < width, other=float("-inf")).to(tl.float32)
    most = tl.max(x, 0)
    to = row * chunks + chunk
    tl.store(largest + to, most)
    tl.store(place + to, tl.min(tl.where((x == most) & (at < width), at, width), 0))
    distance = tl.where(x == float("-inf"), float("-inf"), x - most)
    tl.store(total + to, tl.sum(tl.exp(distance), 0))
    if SCALED:
        given = tl.load(temperatures + row)
        distance = tl.div_rn(distance, tl.where(given == 0, 1.0, given) + tl.zeros_like(distance))
        weight = tl.exp(distance)
        tl.store(scaled + to, tl.sum(weight, 0))
        # A token of probability 0 contributes 0 to the entropy, not 0 * -inf.
        tl.store(weighted + to, tl.sum(tl.where(weight > 0, weight * distance, 0.0), 0))


@triton.jit
def logprobs(
    logits, targets, temperatures, largest, total, scaled, weighted, raw, tempered, entropy, width, chunks,
    SCALED: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Computes from the results of ``chunk_sums``: ``log_softmax(logits[R, V])[target]`` to ``raw[R]``, with ``SCALED`` that at the row's
    temperature to ``tempered``, and the ``entropy`` of the latter distribution. Grid: (R,)."""
    row = tl.program_id(0).to(tl.int64)
    chosen = tl.load(logits + row * width + tl.load(targets + row)).to(tl.float32)
    c = tl.arange(0, BLOCK_C)
    held = c < chunks
    tops = tl.load(largest + row * chunks + c, mask=held, other=float("-inf"))
    top = tl.max(tops, 0)
    distance = tl.where(tops == float("-inf"), float("-inf"), tops - top)
    sums = tl.load(total + row * chunks + c, mask=held, other=0.0)
    tl.store(raw + row, chosen - top - tl.log(tl.sum(sums * tl.exp(distance), 0)))
    if SCALED:
        temperature = tl.load(temperatures + row)
        distance = tl.div_rn(distance, temperature + tl.zeros_like(distance))
        factor = tl.exp(distance)
        sums = tl.load(scaled + row * chunks + c, mask=held, other=0.0) * factor
        parts = tl.load(weighted + row * chunks + c, mask=held, other=0.0) * factor
        whole = tl.sum(sums, 0)
        mean = tl.sum(parts + tl.where(sums > 0, sums * distance, 0.0), 0) / whole
        tl.store(tempered + row, tl.div_rn(chosen - top, temperature) - tl.log(whole))
        tl.store(entropy + row, tl.log(whole) - mean)


@triton.jit
def logprobs_backward(
    logits, targets, chosen, raw, tempered, grad_raw, grad_tempered, temperature, width, SCALED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Replaces ``logits[R, V]`` by the gradient of ``raw[R]`` and, with ``SCALED``, of ``tempered[R]``: ``onehot - softmax(z)`` times ``grad_raw``
    and ``grad_tempered``. Probabilities follow from those of the targets and the logits of these, ``chosen[R]``. Grid: (R, chunks)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    x = tl.load(logits + row * width + at, mask=mask, other=float("-inf")).to(tl.float32)
    hit = tl.where(at == tl.load(targets + row), 1.0, 0.0)
    distance = x - tl.load(chosen + row)
    given = tl.load(grad_raw + row)
    # A row without a gradient has none whatever its logits are.
    grad = tl.where(given == 0, 0.0, given * (hit - tl.exp(distance + tl.load(raw + row))))
    if SCALED:
        given = tl.load(grad_tempered + row) / temperature
        grad += tl.where(given == 0, 0.0, given * (hit - tl.exp(distance / temperature + tl.load(tempered + row))))
    tl.store(logits + row * width + at, grad.to(logits.dtype.element_ty), mask=mask)
