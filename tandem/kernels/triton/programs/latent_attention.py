"""Causal attention whose values are narrower than its keys, as in latent attention, in tiles of a row's two parts: as wide as a value, and the rest.

Neither part is padded to the sum of both, so that rows of 512 and 64 numbers (DeepSeek-AI, 2024) fit into the shared memory of a GPU. In a compressed cache,
whose rows are values too, the first part is loaded once for both. One online softmax (Dao, 2023) goes over blocks of keys at fixed absolute positions; a block
that a row does not see adds exact zeros to it, so that neither the tile nor its other rows affect its bits.
"""

import triton
import triton.language as tl

from tandem.kernels.triton.programs.common import decode_fp8, group_rows, not_finite, product, tile_of, without_spoiled


@triton.jit
def load_part(x, scales, index, read, FIRST: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr):
    """Loads the numbers ``FIRST .. FIRST + SIZE - 1`` of the rows ``index[N]`` int64 of ``D`` numbers: [N, BLOCK], zeros beyond them and where not ``read[N]``.
    ``CODES``: 0 values, 1 int8, 2 e4m3, both times the row's scale."""
    d = tl.arange(0, BLOCK)
    part = tl.load(x + index[:, None] * D + FIRST + d[None, :], mask=read[:, None] & (d < SIZE)[None, :], other=0)
    if CODES != 0:
        scale = tl.load(scales + index, mask=read, other=0.0)
        part = (decode_fp8(part) if CODES == 2 else part.to(tl.float32)) * scale[:, None]
    return part


@triton.jit
def load_queries(q, at, is_row, V: tl.constexpr, D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr):
    """Loads both parts of the queries ``at[M]`` of ``q[T, Hq, D]``: [M, BLOCK_V] and [M, BLOCK_R]."""
    return load_part(q, q, at, is_row, 0, V, D, BLOCK_V, 0), load_part(q, q, at, is_row, V, D - V, D, BLOCK_R, 0)


@triton.jit
def _attend(
    wide, rest, position, end, k, v, scales, table, head, start_row, kv_heads, scale_log2,
    CAREFUL: tl.constexpr, PAGED: tl.constexpr, CODES: tl.constexpr, V: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attends to keys ``0 .. end - 1`` for queries ``wide[BLOCK_M, BLOCK_V]`` and ``rest[BLOCK_M, BLOCK_R]`` at ``position[BLOCK_M]`` (-1: no row): the largest
    score in units of log 2, the sum of weights and the weighted values. ``CAREFUL``: 0 times a value that is not finite is 0, and rows that attend to such a
    value become NaN."""
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for start in range(0, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        read = at < end
        if PAGED:
            index = tl.load(table + at // 16, mask=read, other=0).to(tl.int64) * 16 + at % 16
        else:
            index = (start_row + at).to(tl.int64) * kv_heads + head
        keys = load_part(k, scales, index, read, 0, V, D, BLOCK_V, CODES).to(wide.dtype)
        others = load_part(k, scales, index, read, V, D - V, D, BLOCK_R, CODES).to(wide.dtype)
        scores = product(rest, tl.trans(others), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), WIDEN)
        scores = product(wide, tl.trans(keys), scores, WIDEN) * scale_log2
        seen = (at[None, :] <= position[:, None]) & read[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        shrink = tl.exp2(largest - base)
        weights = tl.exp2(scores - base[:, None])
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        values = keys if PAGED else load_part(v, scales, index, read, 0, V, V, BLOCK_V, 0)
        if CAREFUL:
            values, total = without_spoiled(values, seen, total)
        acc = product(weights.to(wide.dtype), values, acc * shrink[:, None], WIDEN)
        largest = new
    return largest, total, acc


@triton.jit
def latent_attention(
    q, k, v, scales, tables, starts, lengths, out, log_total, sequences, table_width, query_heads, kv_heads, scale_log2, KEEPS_TOTAL: tl.constexpr,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, PARTS: tl.constexpr, PAGED: tl.constexpr, CODES: tl.constexpr, V: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Computes a tile of ``BLOCK_M // GROUP_ROWS`` tokens of a sequence times ``GROUP`` query heads, one of the ``PARTS`` of those of a key-value head.

    Grid: (tiles, key-value heads times ``PARTS``). ``starts[S + 1]``: where sequences start in ``q[T, Hq, D]``. ``PAGED``: keys, and values, are rows of a
    compressed cache of one head, and ``lengths[S]`` the sequences' tokens in it, the new ones at the end; otherwise ``k[T, Hkv, D]`` and ``v[T, Hkv, V]``.
    Writes ``out[T, Hq, V]``, and with ``KEEPS_TOTAL`` the base-2 logarithm of the sum of weights to ``log_total[T, Hq]``."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP_ROWS
    part = tl.program_id(1)
    s, row, count, first = tile_of(starts, sequences, TOKENS)
    if first >= count:
        return
    before = 0
    if PAGED:
        before = tl.load(lengths + s) - count
    token, is_row, at, offset, mask = group_rows(first, row, count, part, query_heads, GROUP, GROUP_ROWS, V, BLOCK_M, BLOCK_V)
    position = tl.where(is_row, before + token, -1)
    end = before + tl.minimum(first + TOKENS, count)
    wide, rest = load_queries(q, at, is_row, V, D, BLOCK_V, BLOCK_R)
    table = tables + s.to(tl.int64) * table_width
    largest, total, acc = _attend(
        wide, rest, position, end, k, v, scales, table, part // PARTS, row, kv_heads, scale_log2,
        False, PAGED, CODES, V, D, BLOCK_M, BLOCK_N, BLOCK_V, BLOCK_R, WIDEN,
    )  # fmt: skip
    # 0 times a value that is not finite is not 0: only then is the tile computed once more, with care.
    if not_finite(acc):
        largest, total, acc = _attend(
            wide, rest, position, end, k, v, scales, table, part // PARTS, row, kv_heads, scale_log2,
            True, PAGED, CODES, V, D, BLOCK_M, BLOCK_N, BLOCK_V, BLOCK_R, WIDEN,
        )  # fmt: skip
    result = tl.div_rn(acc, total[:, None] + tl.zeros_like(acc))
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=mask)
    if KEEPS_TOTAL:
        tl.store(log_total + at, largest + tl.log2(total), mask=is_row)
