"""The gated delta rule (Yang et al., 2024, arXiv 2412.06464, equation 10) token by token: a program keeps columns of one head's matrix in registers."""

import triton
import triton.language as tl


@triton.jit
def _token(
    q, k, v, decay, beta, kept, t, end, head, d, e,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Returns the inputs of token ``t``, of that before ``end`` if there is none, and the row to which its state is copied."""
    at = tl.maximum(tl.minimum(t, end - 1), 0).to(tl.int64)
    key_at = (at * KEY_HEADS + head // (HEADS // KEY_HEADS)) * K + d
    own = at * HEADS + head
    query = tl.load(q + key_at, mask=d < K, other=0.0).to(tl.float32)
    key = tl.load(k + key_at, mask=d < K, other=0.0).to(tl.float32)
    value = tl.load(v + own * V + e, mask=e < V, other=0.0).to(tl.float32)
    return query, key, value, tl.load(decay + own).to(tl.float32), tl.load(beta + own).to(tl.float32), tl.load(kept + at)


@triton.jit
def delta_tokens(
    q, k, v, decay, beta, bounds, matrices, rows, fresh, kept, out,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Computes ``out[T, HEADS, V]`` of ``q, k[T, KEY_HEADS, K]``, ``v[T, HEADS, V]`` and ``decay, beta[T, HEADS]`` within each of the sequences marked by
    ``bounds[S + 1]``. Their states go on from, and to, ``matrices[R, HEADS, K, V]`` at ``rows[S]``, and are zero at first where ``fresh[S]``. That after token
    t is copied to row ``kept[t]``, if it is not negative. Grid: (S, HEADS, tiles of V)."""
    s, head = tl.program_id(0), tl.program_id(1)
    d, e = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (d < K)[:, None] & (e < V)[None, :]
    place = (head * K + d)[:, None] * V + e[None, :]
    own = matrices + tl.load(rows + s).to(tl.int64) * (HEADS * K * V) + place
    state = tl.where(tl.load(fresh + s) != 0, 0.0, tl.load(own, mask=inside, other=0.0))
    begin, end = tl.load(bounds + s).to(tl.int32), tl.load(bounds + s + 1).to(tl.int32)
    query, key, value, shrink, rate, target = _token(q, k, v, decay, beta, kept, begin, end, head, d, e, KEY_HEADS, HEADS, K, V)
    for t in range(begin, end):
        # Those of the next token arrive while this one is computed.
        later = _token(q, k, v, decay, beta, kept, t + 1, end, head, d, e, KEY_HEADS, HEADS, K, V)
        state = state * shrink
        delta = (value - tl.sum(state * key[:, None], 0)) * rate
        state = state + key[:, None] * delta[None, :]
        result = tl.sum(state * query[:, None], 0)
        tl.store(out + ((tl.zeros((), tl.int64) + t) * HEADS + head) * V + e, result.to(out.dtype.element_ty), mask=e < V)
        if target >= 0:
            tl.store(matrices + target.to(tl.int64) * (HEADS * K * V) + place, state, mask=inside)
        query, key, value, shrink, rate, target = later
    tl.store(own, state, mask=inside)
