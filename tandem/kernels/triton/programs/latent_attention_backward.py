"""Gradients of ``latent_attention`` over packed keys and values (Dao, 2023, algorithm 2). Each output is summed by one program, in order."""

import triton
import triton.language as tl

from tandem.kernels.triton.programs.common import group_rows, product, tile_of
from tandem.kernels.triton.programs.latent_attention import load_part, load_queries


@triton.jit
def _gradients_of_scores(
    wide, rest, keys, others, values, grads, position, n, count, total, own, scale_log2, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDEN: tl.constexpr
):
    """Returns the weights [M, N] of the keys at positions ``n[N]`` for queries at ``position[M]``, and the gradients [M, N] by their scores."""
    scores = product(rest, tl.trans(others), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), WIDEN)
    scores = product(wide, tl.trans(keys), scores, WIDEN) * scale_log2
    seen = (n[None, :] <= position[:, None]) & (n < count)[None, :]
    weights = tl.where(seen, tl.exp2(scores - total[:, None]), 0.0)
    by_weight = product(grads, tl.trans(values), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), WIDEN)
    return weights, weights * (by_weight - own[:, None])


@triton.jit
def latent_queries(
    q, k, v, grad, log_total, inner, starts, grad_q, sequences, query_heads, kv_heads, scale, scale_log2,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, PARTS: tl.constexpr, V: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Computes the gradients by ``q[T, Hq, D]`` of a tile of rows, tiled as in ``latent_attention``. ``grad[T, Hq, V]``: the gradients by its output;
    ``inner[T, Hq]``: their dot products with that output. Grid: (tiles, key-value heads times ``PARTS``)."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP_ROWS
    part = tl.program_id(1)
    _, row, count, first = tile_of(starts, sequences, TOKENS)
    if first >= count:
        return
    token, is_row, at, _offset, _mask = group_rows(first, row, count, part, query_heads, GROUP, GROUP_ROWS, D, BLOCK_M, BLOCK_V)
    position = tl.where(is_row, token, -1)
    wide, rest = load_queries(q, at, is_row, V, D, BLOCK_V, BLOCK_R)
    grads = load_part(grad, grad, at, is_row, 0, V, V, BLOCK_V, 0)
    total = tl.load(log_total + at, mask=is_row, other=0.0)
    own = tl.load(inner + at, mask=is_row, other=0.0)
    by_wide = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    by_rest = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for begin in range(0, tl.minimum(first + TOKENS, count), BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        index = (row + n).to(tl.int64) * kv_heads + part // PARTS
        keys, others = load_queries(k, index, n < count, V, D, BLOCK_V, BLOCK_R)
        values = load_part(v, v, index, n < count, 0, V, V, BLOCK_V, 0)
        _weights, by_score = _gradients_of_scores(
            wide, rest, keys, others, values, grads, position, n, count, total, own, scale_log2, BLOCK_M, BLOCK_N, WIDEN
        )
        by_wide = product(by_score.to(keys.dtype), keys, by_wide, WIDEN)
        by_rest = product(by_score.to(keys.dtype), others, by_rest, WIDEN)
    d, r = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
    to = grad_q + at[:, None] * D
    tl.store(to + d[None, :], (by_wide * scale).to(grad_q.dtype.element_ty), mask=is_row[:, None] & (d < V)[None, :])
    tl.store(to + V + r[None, :], (by_rest * scale).to(grad_q.dtype.element_ty), mask=is_row[:, None] & (r < D - V)[None, :])


@triton.jit
def latent_keys(
    q, k, v, grad, log_total, inner, starts, grad_k, grad_v, sequences, query_heads, kv_heads, scale, scale_log2,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, PARTS: tl.constexpr, V: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Computes the gradients by ``k[T, Hkv, D]`` and ``v[T, Hkv, V]`` of ``BLOCK_N`` keys of a sequence. Grid: (tiles of keys, key-value heads)."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP_ROWS
    head = tl.program_id(1)
    _, row, count, first = tile_of(starts, sequences, BLOCK_N)
    if first >= count:
        return
    n = first + tl.arange(0, BLOCK_N)
    index = (row + n).to(tl.int64) * kv_heads + head
    keys, others = load_queries(k, index, n < count, V, D, BLOCK_V, BLOCK_R)
    values = load_part(v, v, index, n < count, 0, V, V, BLOCK_V, 0)
    by_key = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    by_other = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    by_value = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    begun = first // TOKENS
    for step in range(begun * PARTS, tl.cdiv(count, TOKENS) * PARTS):
        part = head * PARTS + step % PARTS
        token, is_row, at, _offset, _mask = group_rows(
            step // PARTS * TOKENS, row, count, part, query_heads, GROUP, GROUP_ROWS, D, BLOCK_M, BLOCK_V
        )
        position = tl.where(is_row, token, -1)
        wide, rest = load_queries(q, at, is_row, V, D, BLOCK_V, BLOCK_R)
        grads = load_part(grad, grad, at, is_row, 0, V, V, BLOCK_V, 0)
        total = tl.load(log_total + at, mask=is_row, other=0.0)
        own = tl.load(inner + at, mask=is_row, other=0.0)
        weights, by_score = _gradients_of_scores(
            wide, rest, keys, others, values, grads, position, n, count, total, own, scale_log2, BLOCK_M, BLOCK_N, WIDEN
        )
        by_value = product(tl.trans(weights.to(grads.dtype)), grads, by_value, WIDEN)
        by_key = product(tl.trans(by_score.to(wide.dtype)), wide, by_key, WIDEN)
        by_other = product(tl.trans(by_score.to(wide.dtype)), rest, by_other, WIDEN)
    d, r = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
    to = grad_k + index[:, None] * D
    valued = (n < count)[:, None] & (d < V)[None, :]
    tl.store(to + d[None, :], (by_key * scale).to(grad_k.dtype.element_ty), mask=valued)
    tl.store(to + V + r[None, :], (by_other * scale).to(grad_k.dtype.element_ty), mask=(n < count)[:, None] & (r < D - V)[None, :])
    tl.store(grad_v + index[:, None] * V + d[None, :], by_value.to(grad_v.dtype.element_ty), mask=valued)
