"""The gated delta rule in chunks of 64 tokens from the start of each sequence (Yang et al., 2024, arXiv 2412.06464, section 3.3).

With S the state before a chunk, D[i, j] the product of the decays of tokens j + 1 .. i, G[i] that of the tokens up to i, and A[i, j] = beta[i] D[i, j]
(k[i] k[j]) for j < i, the corrections of a chunk solve ``(1 + A) delta = beta (v - G (k S))``. In the WY form they are ``delta = u - w S``, with
``u = (1 + A)^-1 beta v`` and ``w = (1 + A)^-1 beta G k``, which no state enters: chunks are prepared side by side, one program a head takes the state through
them, and outputs are computed side by side again. Products of decays are multiplied up rather than divided or taken from sums of logarithms, so that a decay
of 0 is a decay like others.
"""

import triton
import triton.language as tl

from tandem.kernels.triton.programs.common import sequence_with, tile_of

CHUNK = tl.constexpr(64)


@triton.jit
def dot(a, b):
    """Computes ``a[M, K] @ b[K, N]`` of fp32 numbers. Three products of 10-bit mantissas come near fp32 (Ootomo and Yokota, 2022) on tensor cores."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def load_rows(x, at, valid, d, SIZE: tl.constexpr):
    """Loads the rows ``at[CHUNK]`` of ``x[., SIZE]`` at the columns ``d``; zeros where not ``valid``."""
    return tl.load(x + at[:, None] * SIZE + d[None, :], mask=valid[:, None] & (d < SIZE)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_rows(x, at, valid, d, values, SIZE: tl.constexpr):
    tl.store(x + at[:, None] * SIZE + d[None, :], values.to(x.dtype.element_ty), mask=valid[:, None] & (d < SIZE)[None, :])


@triton.jit
def load_state(x, d, e, K: tl.constexpr, V: tl.constexpr):
    """Loads the tile of a matrix [K, V] at rows ``d`` and columns ``e``."""
    return tl.load(x + d[:, None] * V + e[None, :], mask=(d < K)[:, None] & (e < V)[None, :], other=0.0)


@triton.jit
def store_state(x, d, e, values, K: tl.constexpr, V: tl.constexpr):
    tl.store(x + d[:, None] * V + e[None, :], values, mask=(d < K)[:, None] & (e < V)[None, :])


@triton.jit
def rows_of(start, first, count, head, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr):
    """Returns of the chunk from token ``first`` on, of a sequence of ``count`` tokens that starts at row ``start``: which of its tokens there are, and their
    rows in ``[T, KEY_HEADS]`` and ``[T, HEADS]``, for value head ``head``."""
    token = first + tl.arange(0, CHUNK)
    at = (start + token).to(tl.int64)
    return token < count, at * KEY_HEADS + head // (HEADS // KEY_HEADS), at * HEADS + head


@triton.jit
def chunk_of(starts, sequences, head, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr):
    """Returns of this program's chunk whether it is the surplus one of its sequence, which has no tokens, and what ``rows_of`` returns."""
    _, start, count, first = tile_of(starts, sequences, CHUNK)
    valid, shared, own = rows_of(start, first, count, head, KEY_HEADS, HEADS)
    return first >= count, valid, shared, own


@triton.jit
def scores_of(q, k, shared, valid, decays, d, K: tl.constexpr):
    """Returns the queries of a chunk and the products ``(q k) D`` of its tokens."""
    query, key = load_rows(q, shared, valid, d, K), load_rows(k, shared, valid, d, K)
    return query, dot(query, tl.trans(key)) * decays


@triton.jit
def decays_since(decay, own, valid):
    """Returns the decays ``D[i, j]`` of a chunk, 0 for j > i, and those ``G[i]`` since its start; tokens that are not ``valid`` decay nothing."""
    shrink = tl.load(decay + own, mask=valid, other=1.0).to(tl.float32)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    products = tl.cumprod(tl.where(i > j, shrink[:, None], 1.0), 0)
    return tl.where(i >= j, products, 0.0), tl.cumprod(shrink, 0)


@triton.jit
def decays_until(decay, own, valid, HEADS: tl.constexpr):
    """Returns the decays ``D[last, j]`` of a chunk from each of its tokens to its end, and that of the whole chunk."""
    i = tl.arange(0, CHUNK)
    after = tl.load(decay + own + HEADS, mask=_followed(valid), other=1.0).to(tl.float32)
    rest = tl.cumprod(after, 0, reverse=True)
    first = tl.load(decay + own, mask=valid & (i == 0), other=0.0).to(tl.float32)
    return rest, tl.sum(first * rest, 0)


@triton.jit
def _followed(valid):
    """Returns which tokens have a valid one behind them in their chunk, where the valid ones are the first."""
    i = tl.arange(0, CHUNK)
    return i + 1 < tl.sum(valid.to(tl.int32), 0)


@triton.jit
def _inverse_of_one_plus(below):
    """Returns ``(1 + below)^-1`` of a strictly lower triangular matrix, row by row (forward substitution). Powers of ``below`` would be fewer steps, but grow
    beyond the precision of fp32 where keys resemble each other."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0)
    for r in range(1, CHUNK):
        factors = tl.sum(tl.where(i == r, below, 0.0), 0)
        row = tl.sum(factors[:, None] * inverse, 0)
        inverse = tl.where(i == r, inverse - row[None, :], inverse)
    return inverse


@triton.jit
def delta_chunks(
    k, v, decay, beta, starts, w, u, inverses, sequences,
    KEEPS: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Computes ``w[T, HEADS, K]`` and ``u[T, HEADS, V]``; with ``KEEPS`` also ``(1 + A)^-1`` as ``inverses[places, HEADS, CHUNK, CHUNK]``. Grid: (places of
    chunks, HEADS)."""
    place, head = tl.program_id(0), tl.program_id(1)
    is_surplus, valid, shared, own = chunk_of(starts, sequences, head, KEY_HEADS, HEADS)
    if is_surplus:
        return
    d = tl.arange(0, BLOCK_K)
    key = load_rows(k, shared, valid, d, K)
    rate = tl.load(beta + own, mask=valid, other=0.0).to(tl.float32)
    decays, since = decays_since(decay, own, valid)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse = _inverse_of_one_plus(tl.where(i > j, dot(key, tl.trans(key)) * decays * rate[:, None], 0.0))
    if KEEPS:
        tl.store(inverses + (place.to(tl.int64) * HEADS + head) * (CHUNK * CHUNK) + i * CHUNK + j, inverse)
    store_rows(w, own, valid, d, dot(inverse, key * (rate * since)[:, None]), K)
    for begin in range(0, V, BLOCK_V):
        e = begin + tl.arange(0, BLOCK_V)
        store_rows(u, own, valid, e, dot(inverse, load_rows(v, own, valid, e, V) * rate[:, None]), V)


@triton.jit
def delta_states(
    k, w, u, decay, starts, matrices, rows, fresh, before,
    HAS_STATES: tl.constexpr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Takes the state of a sequence through its chunks: writes that before each chunk to ``before[places, HEADS, K, V]``, and replaces ``u`` by the corrections
    ``delta``. With ``HAS_STATES`` it goes on from, and to, ``matrices`` as in ``delta_tokens``. Grid: (S, HEADS, tiles of V)."""
    s, head = tl.program_id(0), tl.program_id(1)
    d, e = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    start = tl.load(starts + s).to(tl.int32)
    count = tl.load(starts + s + 1).to(tl.int32) - start
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if HAS_STATES:
        kept = matrices + (tl.load(rows + s).to(tl.int64) * HEADS + head) * (K * V)
        if tl.load(fresh + s) == 0:
            state = load_state(kept, d, e, K, V)
    for first in range(0, count, CHUNK):
        place = (start // CHUNK + s + first // CHUNK).to(tl.int64)
        store_state(before + (place * HEADS + head) * (K * V), d, e, state, K, V)
        valid, shared, own = rows_of(start, first, count, head, KEY_HEADS, HEADS)
        delta = load_rows(u, own, valid, e, V) - dot(load_rows(w, own, valid, d, K), state)
        store_rows(u, own, valid, e, delta, V)
        rest, whole = decays_until(decay, own, valid, HEADS)
        state = state * whole + dot(tl.trans(load_rows(k, shared, valid, d, K)), delta * rest[:, None])
    if HAS_STATES:
        store_state(kept, d, e, state, K, V)


@triton.jit
def delta_outputs(
    q, k, delta, decay, starts, before, out, sequences,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Computes ``out = G (q S) + (q k D) delta``. Grid: (places of chunks, HEADS, tiles of V)."""
    place, head = tl.program_id(0), tl.program_id(1)
    is_surplus, valid, shared, own = chunk_of(starts, sequences, head, KEY_HEADS, HEADS)
    if is_surplus:
        return
    d, e = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    decays, since = decays_since(decay, own, valid)
    query, scores = scores_of(q, k, shared, valid, decays, d, K)
    state = load_state(before + (place.to(tl.int64) * HEADS + head) * (K * V), d, e, K, V)
    result = dot(query * since[:, None], state)
    result += dot(scores, load_rows(delta, own, valid, e, V))
    store_rows(out, own, valid, e, result, V)


@triton.jit
def delta_kept(
    k, delta, decay, starts, before, kept, matrices, sequences,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Writes the state after token t to ``matrices`` at row ``kept[t]``, if it is not negative. Grid: (T, HEADS, tiles of V)."""
    t, head = tl.program_id(0), tl.program_id(1)
    target = tl.load(kept + t)
    if target < 0:
        return
    s = sequence_with(t, starts, sequences)
    start = tl.load(starts + s).to(tl.int32)
    first = (t - start) // CHUNK * CHUNK
    place = (start // CHUNK + s + first // CHUNK).to(tl.int64)
    valid, shared, own = rows_of(start, first, t - start + 1, head, KEY_HEADS, HEADS)
    d, e = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    rest, whole = decays_until(decay, own, valid, HEADS)
    corrections = load_rows(delta, own, valid, e, V) * rest[:, None]
    state = load_state(before + (place * HEADS + head) * (K * V), d, e, K, V) * whole
    state += dot(tl.trans(load_rows(k, shared, valid, d, K)), corrections)
    store_state(matrices + (target.to(tl.int64) * HEADS + head) * (K * V), d, e, state, K, V)
