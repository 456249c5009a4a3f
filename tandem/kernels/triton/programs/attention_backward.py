"""Gradients of packed causal attention (Dao, 2023, algorithm 2). Each output is summed by one program, in order: no atomic addition, so the same
inputs give the same bits."""

import triton
import triton.language as tl

from tandem.kernels.triton.programs.common import cap_slope, capped, group_rows, product, tile_of


@triton.jit
def _weights(q, k, position, at, log_total, scale_log2, last, WINDOW: tl.constexpr, CAP: tl.constexpr, WIDEN: tl.constexpr):
    """Returns the weights [M, N] of the keys ``k[N, D]`` at positions ``at[N]``, up to ``last``, for ``q[M, D]`` at ``position[M]``, and their scores."""
    scores = product(q, tl.trans(k), tl.zeros((q.shape[0], k.shape[0]), tl.float32), WIDEN) * scale_log2
    if CAP > 0:
        scores = capped(scores, CAP)
    seen = (at[None, :] <= position[:, None]) & (at < last)[None, :]
    if WINDOW > 0:
        seen = seen & (at[None, :] > position[:, None] - WINDOW)
    return tl.where(seen, tl.exp2(scores - log_total[:, None]), 0.0), scores


@triton.jit
def attention_queries(
    q, k, v, grad, log_total, inner, starts, grad_q, sequences, query_heads, kv_heads, scale, scale_log2,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Computes the gradients by ``q[T, Hq, D]`` of a tile of rows, tiled as in ``attention``. ``grad[T, Hq, D]``: the gradients by its
    output; ``inner[T, Hq]``: their dot products with that output. Grid: (tiles, key-value heads)."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP_ROWS
    head = tl.program_id(1)
    _, row, count, first = tile_of(starts, sequences, TOKENS)
    if first >= count:
        return
    token, is_row, at, offset, mask = group_rows(first, row, count, head, query_heads, GROUP, GROUP_ROWS, D, BLOCK_M, BLOCK_D)
    position = tl.where(is_row, token, -1)
    d = tl.arange(0, BLOCK_D)
    queries = tl.load(q + offset, mask=mask, other=0)
    grads = tl.load(grad + offset, mask=mask, other=0)
    total = tl.load(log_total + at, mask=is_row, other=0.0)
    own = tl.load(inner + at, mask=is_row, other=0.0)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(0, first - WINDOW + 1)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for begin in range(low // BLOCK_N * BLOCK_N, tl.minimum(first + TOKENS, count), BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        from_key = ((row + n).to(tl.int64) * kv_heads + head)[:, None] * D + d[None, :]
        read = (n < count)[:, None] & (d < D)[None, :]
        keys = tl.load(k + from_key, mask=read, other=0)
        values = tl.load(v + from_key, mask=read, other=0)
        weights, scores = _weights(queries, keys, position, n, total, scale_log2, count, WINDOW, CAP, WIDEN)
        by_weight = product(grads, tl.trans(values), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), WIDEN)
        by_score = weights * (by_weight - own[:, None])
        if CAP > 0:
            by_score = by_score * cap_slope(scores, CAP)
        acc = product(by_score.to(keys.dtype), keys, acc, WIDEN)
    tl.store(grad_q + offset, (acc * scale).to(grad_q.dtype.element_ty), mask=mask)


@triton.jit
def attention_keys(
    q, k, v, grad, log_total, inner, starts, grad_k, grad_v, sequences, query_heads, kv_heads, scale, scale_log2,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Computes the gradients by ``k`` and ``v`` [T, Hkv, D] of ``BLOCK_N`` keys of a sequence. Grid: (tiles of keys, key-value heads)."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP_ROWS
    head = tl.program_id(1)
    _, row, count, first = tile_of(starts, sequences, BLOCK_N)
    if first >= count:
        return
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    to_key = ((row + n).to(tl.int64) * kv_heads + head)[:, None] * D + d[None, :]
    read = (n < count)[:, None] & (d < D)[None, :]
    keys = tl.load(k + to_key, mask=read, other=0)
    values = tl.load(v + to_key, mask=read, other=0)
    by_key = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    by_value = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    end = count
    if WINDOW > 0:
        end = tl.minimum(count, first + BLOCK_N + WINDOW - 1)
    for begin in range(first // TOKENS * TOKENS, end, TOKENS):
        token, is_row, at, offset, mask = group_rows(begin, row, count, head, query_heads, GROUP, GROUP_ROWS, D, BLOCK_M, BLOCK_D)
        position = tl.where(is_row, token, -1)
        queries = tl.load(q + offset, mask=mask, other=0)
        grads = tl.load(grad + offset, mask=mask, other=0)
        total = tl.load(log_total + at, mask=is_row, other=0.0)
        own = tl.load(inner + at, mask=is_row, other=0.0)
        weights, scores = _weights(queries, keys, position, n, total, scale_log2, count, WINDOW, CAP, WIDEN)
        by_value = product(tl.trans(weights.to(grads.dtype)), grads, by_value, WIDEN)
        by_weight = product(grads, tl.trans(values), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), WIDEN)
        by_score = weights * (by_weight - own[:, None])
        if CAP > 0:
            by_score = by_score * cap_slope(scores, CAP)
        by_key = product(tl.trans(by_score.to(queries.dtype)), queries, by_key, WIDEN)
    tl.store(grad_k + to_key, (by_key * scale).to(grad_k.dtype.element_ty), mask=read)
    tl.store(grad_v + to_key, by_value.to(grad_v.dtype.element_ty), mask=read)
