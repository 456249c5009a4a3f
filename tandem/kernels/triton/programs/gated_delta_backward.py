"""Gradients of the gated delta rule in chunks (``gated_delta_chunks``), whose states, corrections and inverses are computed again first.

Each output is summed by one program in order, without atomic addition. The gradient by a decay is a sum over all pairs of tokens or states around it, each of
which has that decay as a factor, divided by it; no difference of larger sums is taken, so that small decays keep their digits.
"""

import triton
import triton.language as tl

from tandem.kernels.triton.programs.gated_delta_chunks import (
    CHUNK,
    chunk_of,
    decays_since,
    decays_until,
    dot,
    load_rows,
    load_state,
    rows_of,
    scores_of,
    store_rows,
    store_state,
)


@triton.jit
def delta_outputs_backward(
    q, k, grad, decay, starts, by_delta, sequences,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Computes the gradients ``by_delta[T, HEADS, V]`` by the corrections of a chunk's own outputs, whose gradients are ``grad[T, HEADS, V]``. Grid: (places
    of chunks, HEADS, tiles of V)."""
    head = tl.program_id(1)
    is_surplus, valid, shared, own = chunk_of(starts, sequences, head, KEY_HEADS, HEADS)
    if is_surplus:
        return
    d, e = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    decays, _since = decays_since(decay, own, valid)
    _query, scores = scores_of(q, k, shared, valid, decays, d, K)
    store_rows(by_delta, own, valid, e, dot(tl.trans(scores), load_rows(grad, own, valid, e, V)), V)


@triton.jit
def delta_states_backward(
    q, k, w, grad, decay, starts, by_delta, after,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Takes the gradient by a sequence's state backwards through its chunks: writes that by the state behind each chunk to ``after[places, HEADS, K, V]``, and
    adds what it contributes to ``by_delta``. Grid: (S, HEADS, tiles of V)."""
    s, head = tl.program_id(0), tl.program_id(1)
    d, e = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    start = tl.load(starts + s).to(tl.int32)
    count = tl.load(starts + s + 1).to(tl.int32) - start
    chunks = tl.cdiv(count, CHUNK)
    by_state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    for step in range(chunks):
        chunk = chunks - 1 - step
        place = (start // CHUNK + s + chunk).to(tl.int64)
        store_state(after + (place * HEADS + head) * (K * V), d, e, by_state, K, V)
        valid, shared, own = rows_of(start, chunk * CHUNK, count, head, KEY_HEADS, HEADS)
        rest, whole = decays_until(decay, own, valid, HEADS)
        own_gradient = load_rows(by_delta, own, valid, e, V)
        own_gradient += dot(load_rows(k, shared, valid, d, K) * rest[:, None], by_state)
        store_rows(by_delta, own, valid, e, own_gradient, V)
        since = tl.cumprod(tl.load(decay + own, mask=valid, other=1.0).to(tl.float32), 0)
        by_state = by_state * whole + dot(tl.trans(load_rows(q, shared, valid, d, K) * since[:, None]), load_rows(grad, own, valid, e, V))
        by_state -= dot(tl.trans(load_rows(w, own, valid, d, K)), own_gradient)


@triton.jit
def delta_reads_backward(
    q, k, v, decay, beta, delta, grad, by_delta, inverses, before, after, starts, by_q, by_k, by_v, by_decay, by_beta, sequences,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Replaces ``by_delta`` by the gradients of the right sides of the equations that the corrections solve. Computes ``by_v[T, HEADS, V]``, and of ``by_q,
    by_k[T, HEADS, K]`` and ``by_decay, by_beta[T, HEADS]``, all fp32, what comes through the states around a chunk; that by a decay is multiplied with it.
    Grid: (places of chunks, HEADS)."""
    place, head = tl.program_id(0), tl.program_id(1)
    is_surplus, valid, shared, own = chunk_of(starts, sequences, head, KEY_HEADS, HEADS)
    if is_surplus:
        return
    at = place.to(tl.int64) * HEADS + head
    d = tl.arange(0, BLOCK_K)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    rate = tl.load(beta + own, mask=valid, other=0.0).to(tl.float32)
    since = tl.cumprod(tl.load(decay + own, mask=valid, other=1.0).to(tl.float32), 0)
    rest, whole = decays_until(decay, own, valid, HEADS)

    # Sums over V, a tile at a time, one after another: registers hold few of them at once.
    by_query = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    for begin in range(0, V, BLOCK_V):
        e = begin + tl.arange(0, BLOCK_V)
        by_query += dot(load_rows(grad, own, valid, e, V), tl.trans(load_state(before + at * (K * V), d, e, K, V)))
    by_query = by_query * since[:, None]
    from_start = tl.sum(load_rows(q, shared, valid, d, K) * by_query, 1)
    store_rows(by_q, own, valid, d, by_query, K)

    inverse = tl.trans(tl.load(inverses + at * (CHUNK * CHUNK) + i * CHUNK + j))
    recalled = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    by_rate = tl.zeros((CHUNK,), tl.float32)
    for begin in range(0, V, BLOCK_V):
        e = begin + tl.arange(0, BLOCK_V)
        right = dot(inverse, load_rows(by_delta, own, valid, e, V))
        store_rows(by_delta, own, valid, e, right, V)
        store_rows(by_v, own, valid, e, right * rate[:, None], V)
        by_rate += tl.sum(right * load_rows(v, own, valid, e, V), 1)
        recalled += dot(right, tl.trans(load_state(before + at * (K * V), d, e, K, V)))
    key = load_rows(k, shared, valid, d, K)
    recalled = recalled * since[:, None]
    by_recall = tl.sum(key * recalled, 1)
    tl.store(by_beta + own, by_rate - by_recall, mask=valid)
    from_start -= rate * by_recall

    written = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    by_whole = tl.zeros((BLOCK_V,), tl.float32)
    for begin in range(0, V, BLOCK_V):
        e = begin + tl.arange(0, BLOCK_V)
        by_state = load_state(after + at * (K * V), d, e, K, V)
        written += dot(load_rows(delta, own, valid, e, V), tl.trans(by_state))
        by_whole += tl.sum(load_state(before + at * (K * V), d, e, K, V) * by_state, 0)
    written = written * rest[:, None]
    to_end = tl.sum(key * written, 1)
    store_rows(by_k, own, valid, d, written - recalled * rate[:, None], K)

    by_log = tl.sum(tl.where(i >= j, from_start[:, None], 0.0), 0) + tl.sum(tl.where(i < j, to_end[:, None], 0.0), 0)
    tl.store(by_decay + own, by_log + whole * tl.sum(by_whole, 0), mask=valid)


@triton.jit
def delta_pairs_backward(
    q, k, decay, beta, delta, grad, right, starts, by_q, by_k, by_decay, by_beta, sequences,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Adds to the results of ``delta_reads_backward``, of which ``right[T, HEADS, V]`` is one, what comes through the pairs of tokens within a chunk. Grid:
    (places of chunks, HEADS)."""
    head = tl.program_id(1)
    is_surplus, valid, shared, own = chunk_of(starts, sequences, head, KEY_HEADS, HEADS)
    if is_surplus:
        return
    d = tl.arange(0, BLOCK_K)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    by_score, by_erased = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    for begin in range(0, V, BLOCK_V):
        e = begin + tl.arange(0, BLOCK_V)
        corrections = tl.trans(load_rows(delta, own, valid, e, V))
        by_score += dot(load_rows(grad, own, valid, e, V), corrections)
        by_erased -= dot(load_rows(right, own, valid, e, V), corrections)
    decays, _since = decays_since(decay, own, valid)
    by_score = tl.where(i >= j, by_score, 0.0) * decays
    by_erased = tl.where(i > j, by_erased, 0.0) * decays
    rate = tl.load(beta + own, mask=valid, other=0.0).to(tl.float32)
    query, key = load_rows(q, shared, valid, d, K), load_rows(k, shared, valid, d, K)
    likeness = dot(key, tl.trans(key))
    by_rate = tl.load(by_beta + own, mask=valid, other=0.0) + tl.sum(by_erased * likeness, 1)
    tl.store(by_beta + own, by_rate, mask=valid)
    by_erased = by_erased * rate[:, None]
    pairs = by_score * dot(query, tl.trans(key)) + by_erased * likeness
    store_rows(by_q, own, valid, d, load_rows(by_q, own, valid, d, K) + dot(by_score, key), K)
    by_key = load_rows(by_k, own, valid, d, K) + dot(tl.trans(by_score), query)
    store_rows(by_k, own, valid, d, by_key + dot(by_erased + tl.trans(by_erased), key), K)

    # A decay at j stands between the tokens before it and those from it on.
    before_it = dot(pairs, tl.where(i < j, 1.0, 0.0))
    by_log = tl.load(by_decay + own, mask=valid, other=0.0) + tl.sum(tl.where(i >= j, before_it, 0.0), 0)
    shrink = tl.load(decay + own, mask=valid, other=1.0).to(tl.float32)
    # A decay of 0 comes from an underflow, through which no gradient passes.
    tl.store(by_decay + own, tl.where(shrink > 0.0, by_log / tl.where(shrink > 0.0, shrink, 1.0), 0.0), mask=valid)
