"""One token for each row of logits, without sorting and without asking the host anything.

A row's settings are read here, and each filter becomes a threshold: a token stays where its logit lies above it, or is equal to it and one of the first
so many equals by id. Thresholds are found bit by bit in the order of floating-point numbers, with one pass over the row for each bit, and only in
rows that have that filter. Weights are fp32; their sums are fp64, by blocks of ids in order.
"""

import triton
import triton.language as tl


@triton.jit
def _key(x):
    """An int64 from 0 upwards that orders as the fp32 ``x`` does; -0 is 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _number(key):
    """The fp32 whose ``_key`` is ``key``."""
    bits = (key - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _kept(x, seen, floor, threshold, equals):
    """Which of a block of logits stay, where ``seen`` equals of the threshold stand before it, and how many have been seen after it."""
    key = _key(x)
    is_equal = key == threshold
    place = seen + tl.cumsum(is_equal.to(tl.int32), 0)
    stays = (x >= floor) & ((key > threshold) | (is_equal & (place <= equals)))
    return stays, seen + tl.sum(is_equal.to(tl.int32), 0)


@triton.jit
def _above(own, width, candidate, largest, temperature, floor, threshold, equals, BLOCK: tl.constexpr):
    """Of the tokens that stay and whose key is at least ``candidate``: how many, and the sum of their weights."""
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
def sample(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, tokens, sampling, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of ``logits[R, V]`` -> ``tokens[R]`` int64 and the log-probability ``sampling[R]`` fp32 in the distribution it was drawn from. Grid: (R,).
    The meaning of the settings is that of ``Kernels.sample_rows``."""
    row = tl.program_id(0)
    own = logits + row.to(tl.int64) * width
    given = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row).to(tl.float64)
    min_p = tl.load(min_ps + row)
    is_greedy = given == 0
    temperature = tl.where(is_greedy, 1.0, given)

    largest = float("-inf")
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(own + at, mask=at < width, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, tl.max(x, 0))
    best = width
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(own + at, mask=at < width, other=float("-inf")).to(tl.float32)
        best = tl.minimum(best, tl.min(tl.where((x == largest) & (at < width), at, width), 0))

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
        # The likeliest token stays, whatever is wanted.
        at_least = tl.minimum(at_least, _key(largest))
        _, before = _above(own, width, at_least + 1, largest, temperature, floor, threshold, equals, BLOCK)
        each = tl.exp(tl.div_rn(_number(at_least) - largest, temperature)).to(tl.float64)
        most = tl.ceil(tl.minimum((wanted - before) / each, 2147483000.0)).to(tl.int32)
        most = tl.maximum(most, 1)
        equals = tl.where(at_least == threshold, tl.minimum(equals, most), most)
        threshold = tl.maximum(threshold, at_least)

    _, whole = _above(own, width, nothing, largest, temperature, floor, threshold, equals, BLOCK)
    target = tl.load(uniforms + row) * whole
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
        # Where rounding carries the target to the very end of the sum.
        last = tl.maximum(last, tl.max(tl.where(weights > 0, at, 0), 0))
        weight += tl.sum(weights, 0)
    token = tl.where(is_greedy, best, tl.minimum(drawn, tl.maximum(last, 0)))
    token = tl.minimum(token, width - 1)
    chosen = tl.load(own + token).to(tl.float32)
    scaled = tl.div_rn(chosen - largest, temperature).to(tl.float64) - tl.log(whole)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(sampling + row, tl.where(is_greedy, 0.0, scaled.to(tl.float32)))
