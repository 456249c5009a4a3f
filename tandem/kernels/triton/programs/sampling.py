"""Samples one token for each row of logits, without sorting and without host synchronization.

A row's settings are read here, and each filter becomes a threshold: a token is kept if its logit is above it, or equal to it and among the
first allowed equals by id. Thresholds are determined bit by bit in the order of floating-point numbers, with one pass over the row for each
bit, and only in rows that have that filter. Weights are fp32; their sums are fp64, by blocks of ids in order, or by chunks if no filter is
set.
"""

import triton
import triton.language as tl


@triton.jit
def _key(x):
    """Returns an int64 from 0 upwards with the order of the fp32 ``x``; -0 is 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _number(key):
    """Returns the fp32 whose ``_key`` is ``key``."""
    bits = (key - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _kept(x, seen, floor, threshold, equals):
    """Returns which of a block of logits are kept, given ``seen`` values equal to the threshold before it, and the number seen after it."""
    key = _key(x)
    is_equal = key == threshold
    place = seen + tl.cumsum(is_equal.to(tl.int32), 0)
    stays = (x >= floor) & ((key > threshold) | (is_equal & (place <= equals)))
    return stays, seen + tl.sum(is_equal.to(tl.int32), 0)


@triton.jit
def _above(own, width, candidate, largest, temperature, floor, threshold, equals, BLOCK: tl.constexpr):
    """Returns, for the kept tokens whose key is at least ``candidate``, their number and the sum of their weights."""
    seen = 0
    count = 0
    weight = tl.full((), 0.0, tl.float64)
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(own + at, mask=at < width, other=float("-inf")).to(tl.float32)
        stays, seen = _kept(x, seen, floor, threshold, equals)
        counted = stays & (_key(x) >= candidate) & (at < width)
        count += tl.sum(counted.to(tl.int32), 0)
        weights = tl.exp(tl.div_rn(x - largest, temperature + tl.zeros_like(x)))
        weight += tl.sum(tl.where(counted, weights, 0.0).to(tl.float64), 0)
    return count, weight


@triton.jit
def _filtered(own, width, uniform, largest, temperature, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """Returns the token of a row with filters, and the logarithm of the sum of the kept weights."""
    floor = float("-inf")
    if min_p > 0:
        floor = largest + temperature * tl.log(min_p)
    nothing = tl.full((), 0, tl.int64)
    threshold = nothing - 1
    equals = width
    if (top_k > 0) & (top_k < width):
        at_least = nothing
        step = nothing + 2147483648
        for _bit in range(32):
            count, _ = _above(own, width, at_least + step, largest, temperature, floor, nothing - 1, width, BLOCK)
            at_least = tl.where(count >= top_k, at_least + step, at_least)
            step = step >> 1
        count, _ = _above(own, width, at_least, largest, temperature, floor, at_least, 0, BLOCK)
        threshold = at_least
        equals = (top_k - count).to(tl.int32)
    if top_p < 1:
        _, whole = _above(own, width, nothing, largest, temperature, floor, threshold, equals, BLOCK)
        wanted = top_p * whole
        at_least = nothing
        step = nothing + 2147483648
        for _bit in range(32):
            _, weight = _above(own, width, at_least + step, largest, temperature, floor, threshold, equals, BLOCK)
            at_least = tl.where(weight >= wanted, at_least + step, at_least)
            step = step >> 1
        # The likeliest token is always kept.
        at_least = tl.minimum(at_least, _key(largest))
        _, before = _above(own, width, at_least + 1, largest, temperature, floor, threshold, equals, BLOCK)
        each = tl.exp(tl.div_rn(_number(at_least) - largest, temperature)).to(tl.float64)
        most = tl.ceil(tl.minimum((wanted - before) / each, 2147483000.0)).to(tl.int32)
        most = tl.maximum(most, 1)
        equals = tl.where(at_least == threshold, tl.minimum(equals, most), most)
        threshold = tl.maximum(threshold, at_least)

    _, whole = _above(own, width, nothing, largest, temperature, floor, threshold, equals, BLOCK)
    target = uniform * whole
    drawn = width
    last = 0
    seen = 0
    weight = tl.full((), 0.0, tl.float64)
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(own + at, mask=at < width, other=float("-inf")).to(tl.float32)
        stays, seen = _kept(x, seen, floor, threshold, equals)
        weights = tl.exp(tl.div_rn(x - largest, temperature + tl.zeros_like(x)))
        weights = tl.where(stays & (at < width), weights, 0.0).to(tl.float64)
        cumulative = weight + tl.cumsum(weights, 0)
        drawn = tl.minimum(drawn, tl.min(tl.where((cumulative > target) & (weights > 0), at, width), 0))
        # For rounding that moves the target to the very end of the sum.
        last = tl.maximum(last, tl.max(tl.where(weights > 0, at, 0), 0))
        weight += tl.sum(weights, 0)
    return tl.minimum(drawn, last), tl.log(whole)


@triton.jit
def sample(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, tops, places, sums, tokens, sampling, width, chunks,
    BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Samples a row of ``logits[R, V]`` -> ``tokens[R]`` int64 and the log-probability ``sampling[R]`` fp32 in the distribution it was
    drawn from. ``tops``, ``places`` and ``sums`` [R, chunks] are the results of ``chunk_sums``, the last at the row's temperature: without
    filters a chunk is drawn first, and only that chunk is read. Grid: (R,). The settings have the semantics of ``Kernels.sample_rows``."""
    row = tl.program_id(0)
    own = logits + row.to(tl.int64) * width
    given = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    uniform = tl.load(uniforms + row)
    temperature = tl.where(given == 0, 1.0, given)
    c = tl.arange(0, BLOCK_C)
    held = c < chunks
    at = row.to(tl.int64) * chunks + c
    top = tl.load(tops + at, mask=held, other=float("-inf"))
    largest = tl.max(top, 0)
    token = tl.full((), 0, tl.int32)
    log_total = tl.full((), 0.0, tl.float64)
    if given == 0:
        first = tl.load(places + at, mask=held, other=2147483647)
        token = tl.min(tl.where(top == largest, first, 2147483647), 0)
    elif (top_p < 1) | (min_p > 0) | ((top_k > 0) & (top_k < width)):
        token, log_total = _filtered(own, width, uniform, largest, temperature, top_k, top_p.to(tl.float64), min_p, BLOCK)
    else:
        distance = tl.where(top == float("-inf"), float("-inf"), top - largest)
        factor = tl.exp(tl.div_rn(distance, temperature + tl.zeros_like(distance))).to(tl.float64)
        parts = tl.load(sums + at, mask=held, other=0.0).to(tl.float64) * factor
        cumulative = tl.cumsum(parts, 0)
        whole = tl.sum(parts, 0)
        log_total = tl.log(whole)
        target = uniform * whole
        # If rounding moves the target to the very end of a sum, the last token with weight is drawn.
        chunk = tl.min(tl.where((cumulative > target) & (parts > 0), c, BLOCK_C), 0)
        chunk = tl.minimum(chunk, tl.max(tl.where(parts > 0, c, 0), 0))
        rest = target - tl.sum(tl.where(c == chunk, cumulative - parts, 0.0), 0)
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(own + ids, mask=ids < width, other=float("-inf")).to(tl.float32)
        base = tl.sum(tl.where(c == chunk, top, 0.0), 0)
        weights = tl.exp(tl.div_rn(x - base, temperature + tl.zeros_like(x))).to(tl.float64) * tl.sum(tl.where(c == chunk, factor, 0.0), 0)
        weights = tl.where(ids < width, weights, 0.0)
        drawn = tl.min(tl.where((tl.cumsum(weights, 0) > rest) & (weights > 0), ids, width), 0)
        token = tl.minimum(drawn, tl.max(tl.where(weights > 0, ids, 0), 0))
    # If no logit is finite there is no valid token; the log-probability will show it.
    token = tl.maximum(0, tl.minimum(token, width - 1))
    chosen = tl.load(own + token).to(tl.float32)
    scaled = tl.div_rn(chosen - largest, temperature).to(tl.float64) - log_total
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(sampling + row, tl.where(given == 0, 0.0, scaled.to(tl.float32)))
