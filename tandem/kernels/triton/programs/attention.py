"""Causal attention in tiles with an online softmax (Dao, 2023), in splits of a fixed number of absolute positions.

A row is one query head of one token; a tile has rows of one sequence that share a key-value head. The keys of a split are summed from zero,
and the splits are merged in the order of positions, whether one program processes all of them or one each (Flash-Decoding; Dao et al.,
2023, with a fixed size instead of a fixed number). Multiply-adds are explicit, and compiled with contraction off, so that both variants
round alike. Masked keys add exact zeros to a row, so that neither the tile nor its other rows affect its bits.
"""

import triton
import triton.language as tl

from tandem.kernels.triton.programs.common import (
    capped,
    decode_fp8,
    decode_int4,
    group_rows,
    not_finite,
    product,
    sequence_with,
    tile_of,
    without_spoiled,
)


@triton.jit
def _block_of(table, at, read, MASKED: tl.constexpr):
    """Returns the blocks of the cache that hold the positions ``at``."""
    block = tl.load(table + at // 16, mask=read, other=0) if MASKED else tl.load(table + at // 16)
    return block.to(tl.int64)


@triton.jit
def _load_keys(
    k, scales, table, at, read, head, d, start_row, kv_heads,
    MASKED: tl.constexpr, PAGED: tl.constexpr, CODES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Loads keys [BLOCK_D, BLOCK_N] at the positions ``at``; zeros where not ``read``. ``MASKED``: not all are read. ``PAGED``: from a cache of transposed
    keys. ``CODES``: 0 values, 1 int8, 2 e4m3, 3 pairs of 4 bits, whose high ones are those of the second half of a head."""
    mask = (d < D)[:, None] & read[None, :]
    UNMASKED: tl.constexpr = not MASKED and D == BLOCK_D
    if PAGED:
        block = _block_of(table, at, read, MASKED)
        STORED: tl.constexpr = D // 2 if CODES == 3 else D
        offset = ((block * kv_heads + head) * STORED * 16 + at % 16)[None, :] + (d % STORED if CODES == 3 else d)[:, None] * 16
        # Sixteen keys are contiguous, and every block starts at a multiple of 16.
        offset = tl.max_contiguous(tl.multiple_of(offset, (1, 16)), (1, 16))
        keys = tl.load(k + offset) if UNMASKED else tl.load(k + offset, mask=mask, other=0)
        if CODES != 0:
            scale = tl.load(scales + (block * kv_heads + head) * 16 + at % 16, mask=read, other=0.0)
            wide = decode_int4(keys, (d >= STORED)[:, None]) if CODES == 3 else decode_fp8(keys) if CODES == 2 else keys.to(tl.float32)
            keys = wide * scale[None, :]
    else:
        offset = ((start_row + at).to(tl.int64) * kv_heads + head) * D
        own = k + offset[None, :] + d[:, None]
        keys = tl.load(own) if UNMASKED else tl.load(own, mask=mask, other=0)
    return keys


@triton.jit
def _load_values(
    v, scales, table, at, read, head, d, start_row, kv_heads,
    MASKED: tl.constexpr, PAGED: tl.constexpr, CODES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Loads values [BLOCK_N, BLOCK_D], as ``_load_keys``."""
    mask = read[:, None] & (d < D)[None, :]
    UNMASKED: tl.constexpr = not MASKED and D == BLOCK_D
    if PAGED:
        block = _block_of(table, at, read, MASKED)
        STORED: tl.constexpr = D // 2 if CODES == 3 else D
        offset = ((block * kv_heads + head) * 16 + at % 16) * STORED
        own = v + offset[:, None] + (d % STORED if CODES == 3 else d)[None, :]
        values = tl.load(own) if UNMASKED else tl.load(own, mask=mask, other=0)
        if CODES != 0:
            scale = tl.load(scales + (block * kv_heads + head) * 16 + at % 16, mask=read, other=0.0)
            wide = decode_int4(values, (d >= STORED)[None, :]) if CODES == 3 else decode_fp8(values) if CODES == 2 else values.to(tl.float32)
            values = wide * scale[:, None]
    else:
        offset = ((start_row + at).to(tl.int64) * kv_heads + head) * D
        own = v + offset[:, None] + d[None, :]
        values = tl.load(own) if UNMASKED else tl.load(own, mask=mask, other=0)
    return values


@triton.jit
def _attend_block(
    largest, total, acc, q, position, low, start, end, k, v, k_scales, v_scales, table, head, start_row, kv_heads, scale_log2,
    MASKED: tl.constexpr, CAREFUL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PAGED: tl.constexpr, CODES: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Adds the keys ``start .. start + BLOCK_N - 1``, none below ``low`` or from ``end`` on, for ``q[BLOCK_M, BLOCK_D]`` at ``position[BLOCK_M]``
    (-1: no row): the largest score in units of log 2, the sum of weights and the weighted values. ``MASKED``: not every row sees all of them.
    ``CAREFUL``: 0 times a value that is not finite is 0, and rows that attend to such a value become NaN."""
    d = tl.arange(0, BLOCK_D)
    at = start + tl.arange(0, BLOCK_N)
    read = (at < end) & (at >= low) if MASKED else at >= 0
    keys = _load_keys(k, k_scales, table, at, read, head, d, start_row, kv_heads, MASKED, PAGED, CODES, D, BLOCK_D).to(q.dtype)
    scores = product(q, keys, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), WIDEN) * scale_log2
    if CAP > 0:
        scores = capped(scores, CAP)
    if MASKED:
        seen = (at[None, :] <= position[:, None]) & read[None, :]
        if WINDOW > 0:
            seen = seen & (at[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    shrink = tl.exp2(largest - base)
    weights = tl.exp2(scores - base[:, None])
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    values = _load_values(v, v_scales, table, at, read, head, d, start_row, kv_heads, MASKED, PAGED, CODES, D, BLOCK_D).to(q.dtype)
    if CAREFUL:
        values, total = without_spoiled(values, seen, total)
    acc = product(weights.to(q.dtype), values, acc * shrink[:, None], WIDEN)
    return new, total, acc


@triton.jit
def _attend_split(
    q, position, low, begin, end, k, v, k_scales, v_scales, table, head, start_row, kv_heads, scale_log2,
    MASKED: tl.constexpr, CAREFUL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, PAGED: tl.constexpr, CODES: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attends to keys ``begin .. end - 1`` of one split."""
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_N):
        largest, total, acc = _attend_block(
            largest, total, acc, q, position, low, start, end, k, v, k_scales, v_scales, table, head, start_row, kv_heads, scale_log2,
            MASKED, CAREFUL, WINDOW, CAP, PAGED, CODES, D, BLOCK_M, BLOCK_N, BLOCK_D, WIDEN,
        )  # fmt: skip
    return largest, total, acc


@triton.jit
def _merge(largest, total, acc, split_largest, split_total, split_acc):
    """Merges the splits so far with the next one."""
    new = tl.maximum(largest, split_largest)
    base = tl.where(new == float("-inf"), 0.0, new)
    old = tl.exp2(largest - base)
    own = tl.exp2(split_largest - base)
    total = tl.fma(split_total, own, total * old)
    acc = tl.fma(split_acc, own[:, None] + tl.zeros_like(acc), acc * old[:, None])
    return new, total, acc


@triton.jit
def _with_sink(largest, total, acc, sink):
    """Merges all splits with the scores ``sink[M]`` of keys without values (Xiao et al., 2023)."""
    score = sink * 1.4426950408889634
    new = tl.maximum(largest, score)
    old = tl.exp2(largest - new)
    return new, tl.fma(total, old, tl.exp2(score - new)), acc * old[:, None]


@triton.jit
def _attend_all(
    q, position, low, whole, end, k, v, k_scales, v_scales, table, head, start_row, kv_heads, scale_log2,
    CAREFUL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SPLIT: tl.constexpr, PAGED: tl.constexpr, CODES: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attends to all splits, in order. Every row sees all keys before ``whole``, a border of splits: one loop over their blocks, so that loads are
    issued ahead across the borders."""
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    begun = low // SPLIT * SPLIT
    if not CAREFUL and WINDOW == 0:
        one = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        sum_of_one = tl.zeros((BLOCK_M,), tl.float32)
        acc_of_one = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for start in range(begun, whole, BLOCK_N):
            one, sum_of_one, acc_of_one = _attend_block(
                one, sum_of_one, acc_of_one, q, position, low, start, end, k, v, k_scales, v_scales, table, head, start_row, kv_heads, scale_log2,
                False, False, WINDOW, CAP, PAGED, CODES, D, BLOCK_M, BLOCK_N, BLOCK_D, WIDEN,
            )  # fmt: skip
            if (start + BLOCK_N) % SPLIT == 0:
                largest, total, acc = _merge(largest, total, acc, one, sum_of_one, acc_of_one)
                one = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                sum_of_one = tl.zeros((BLOCK_M,), tl.float32)
                acc_of_one = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        begun = tl.maximum(begun, whole)
    for begin in range(begun, end, SPLIT):
        last, sum_of_last, acc_of_last = _attend_split(
            q, position, low, begin, tl.minimum(begin + SPLIT, end), k, v, k_scales, v_scales, table, head, start_row, kv_heads, scale_log2,
            True, CAREFUL, WINDOW, CAP, PAGED, CODES, D, BLOCK_M, BLOCK_N, BLOCK_D, WIDEN,
        )  # fmt: skip
        largest, total, acc = _merge(largest, total, acc, last, sum_of_last, acc_of_last)
    return largest, total, acc


@triton.jit
def attention(
    q, k, v, k_scales, v_scales, tables, starts, lengths, out, log_total, partial, partial_largest, partial_total, sinks, sequences, table_width,
    query_heads, kv_heads, scale_log2, splits, KEEPS_TOTAL: tl.constexpr, SINKS: tl.constexpr,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SPLIT: tl.constexpr, IS_SPLIT: tl.constexpr,
    PAGED: tl.constexpr, CODES: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Computes a tile of ``BLOCK_M // GROUP_ROWS`` tokens of a sequence times the ``GROUP`` query heads of a key-value head.

    Grid: (tiles, key-value heads, splits or 1). ``starts[S + 1]``: where sequences start in ``q[T, Hq, D]``. ``lengths[S]``: paged, their
    tokens in the cache, the new ones at the end; packed, their tokens in q. ``IS_SPLIT``: writes this program's split to ``partial[T, Hq,
    splits, D]``, ``partial_largest`` and ``partial_total`` [T, Hq, splits]; otherwise all splits, in order, to ``out[T, Hq, D]``, and with
    ``KEEPS_TOTAL`` the base-2 logarithm of the sum of weights to ``log_total[T, Hq]``. ``CAP``: the soft cap of the scores in units of log 2 (0: none).
    ``SINKS``: the scores ``sinks[Hq]`` fp32 join the denominators."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP_ROWS
    head = tl.program_id(1)
    s, row, count, first = tile_of(starts, sequences, TOKENS)
    if first >= count:
        return
    before = 0
    if PAGED:
        before = tl.load(lengths + s) - count
    token, is_row, at, offset, mask = group_rows(first, row, count, head, query_heads, GROUP, GROUP_ROWS, D, BLOCK_M, BLOCK_D)
    position = tl.where(is_row, before + token, -1)
    end = before + tl.minimum(first + TOKENS, count)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(0, before + first - WINDOW + 1)
    queries = tl.load(q + offset, mask=mask, other=0)
    table = tables + s.to(tl.int64) * table_width
    # Without a window every row sees all keys up to that of the tile's first token.
    whole = 0
    if WINDOW == 0:
        whole = (before + first + 1) // SPLIT * SPLIT
    if IS_SPLIT:
        split = tl.program_id(2)
        begin = split * SPLIT
        if (begin >= end) | (begin + SPLIT <= low):
            return
        until = tl.minimum(begin + SPLIT, end)
        if begin + SPLIT <= whole:
            largest, total, acc = _attend_split(
                queries, position, low, begin, until, k, v, k_scales, v_scales, table, head, row, kv_heads, scale_log2,
                False, False, WINDOW, CAP, PAGED, CODES, D, BLOCK_M, BLOCK_N, BLOCK_D, WIDEN,
            )  # fmt: skip
        else:
            largest, total, acc = _attend_split(
                queries, position, low, begin, until, k, v, k_scales, v_scales, table, head, row, kv_heads, scale_log2,
                True, False, WINDOW, CAP, PAGED, CODES, D, BLOCK_M, BLOCK_N, BLOCK_D, WIDEN,
            )  # fmt: skip
        if not_finite(acc):
            largest, total, acc = _attend_split(
                queries, position, low, begin, until, k, v, k_scales, v_scales, table, head, row, kv_heads, scale_log2,
                True, True, WINDOW, CAP, PAGED, CODES, D, BLOCK_M, BLOCK_N, BLOCK_D, WIDEN,
            )  # fmt: skip
        to = at * splits + split
        tl.store(partial_largest + to, largest, mask=is_row)
        tl.store(partial_total + to, total, mask=is_row)
        tl.store(partial + to[:, None] * D + tl.arange(0, BLOCK_D)[None, :], acc, mask=mask)
    else:
        largest, total, acc = _attend_all(
            queries, position, low, whole, end, k, v, k_scales, v_scales, table, head, row, kv_heads, scale_log2,
            False, WINDOW, CAP, SPLIT, PAGED, CODES, D, BLOCK_M, BLOCK_N, BLOCK_D, WIDEN,
        )  # fmt: skip
        # 0 times a value that is not finite is not 0: only then is the tile computed once more, with care.
        if not_finite(acc):
            largest, total, acc = _attend_all(
                queries, position, low, whole, end, k, v, k_scales, v_scales, table, head, row, kv_heads, scale_log2,
                True, WINDOW, CAP, SPLIT, PAGED, CODES, D, BLOCK_M, BLOCK_N, BLOCK_D, WIDEN,
            )  # fmt: skip
        if SINKS:
            largest, total, acc = _with_sink(largest, total, acc, tl.load(sinks + at % query_heads, mask=is_row, other=0.0))
        result = tl.div_rn(acc, total[:, None] + tl.zeros_like(acc))
        tl.store(out + offset, result.to(out.dtype.element_ty), mask=mask)
        if KEEPS_TOTAL:
            tl.store(log_total + at, largest + tl.log2(total), mask=is_row)


@triton.jit
def merge_splits(
    partial, partial_largest, partial_total, sinks, starts, lengths, out, sequences, query_heads, splits, SINKS: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merges the splits of one token and ``BLOCK_H`` of its heads, in order, into ``out``. Grid: (tokens, head tiles)."""
    token = tl.program_id(0)
    s = sequence_with(token, starts, sequences)
    position = tl.load(lengths + s) - tl.load(starts + s + 1) + token
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = heads < query_heads
    d = tl.arange(0, BLOCK_D)
    mask = is_head[:, None] & (d < D)[None, :]
    at = token.to(tl.int64) * query_heads + heads
    largest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(0, position - WINDOW + 1)
    for split in range(low // SPLIT, position // SPLIT + 1):
        own = at * splits + split
        one = tl.load(partial_largest + own, mask=is_head, other=float("-inf"))
        sum_of_one = tl.load(partial_total + own, mask=is_head, other=0.0)
        acc_of_one = tl.load(partial + own[:, None] * D + d[None, :], mask=mask, other=0.0)
        largest, total, acc = _merge(largest, total, acc, one, sum_of_one, acc_of_one)
    if SINKS:
        largest, total, acc = _with_sink(largest, total, acc, tl.load(sinks + heads, mask=is_head, other=0.0))
    result = tl.div_rn(acc, total[:, None] + tl.zeros_like(acc))
    tl.store(out + at[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=mask)
