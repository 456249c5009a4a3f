"""Matrix products whose row bits do not depend on the number of rows (He et al., 2025, "Defeating nondeterminism in LLM inference").

An output is one chain of multiply-adds over k from 0 upwards in one accumulator. The number of rows never splits that chain; it only
determines how many outputs one program computes.
"""

import triton
import triton.language as tl

from tandem.kernels.triton.programs.common import product


@triton.jit
def _tile_of(
    x, w, bias, out, row, end, column, N, K,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Computes rows ``row .. end - 1`` of ``x[T, K]``, at most BLOCK_M of them, times columns ``column ..`` of ``w[N, K].T``."""
    m = row + tl.arange(0, BLOCK_M)
    n = column + tl.arange(0, BLOCK_N)
    is_row = m < end
    is_column = n < N
    from_x = x + m.to(tl.int64)[:, None] * K
    from_w = w + n.to(tl.int64)[None, :] * K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, K, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        if EVEN_K:
            a = tl.load(from_x + k[None, :], mask=is_row[:, None], other=0)
            b = tl.load(from_w + k[:, None], mask=is_column[None, :], other=0)
        else:
            a = tl.load(from_x + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=0)
            b = tl.load(from_w + k[:, None], mask=is_column[None, :] & (k < K)[:, None], other=0)
        acc = product(a, b, acc, WIDEN)
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=is_column, other=0).to(tl.float32)[None, :]
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def linear(
    x, w, bias, out, M, N, K, programs,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, BAND: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Computes ``x[M, K] @ w[N, K].T + bias[N]`` -> ``out[M, N]``. Grid: (programs,), each of which computes every ``programs``-th tile.
    Tiles are ordered in bands of ``BAND`` row tiles, so that concurrent tiles share rows and columns in the L2 cache."""
    row_tiles = tl.cdiv(M, BLOCK_M)
    column_tiles = tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, programs):
        band = tile // (BAND * column_tiles)
        tall = tl.minimum(row_tiles - band * BAND, BAND)
        inside = tile % (BAND * column_tiles)
        row = (band * BAND + inside % tall) * BLOCK_M
        column = inside // tall * BLOCK_N
        _tile_of(x, w, bias, out, row, M, column, N, K, HAS_BIAS, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, WIDEN)


@triton.jit
def grouped_linear(
    x, w, bounds, out, groups, N, K,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Computes rows ``bounds[g] .. bounds[g + 1] - 1`` of ``x[R, K]`` times ``w[G, N, K][g].T``. Grid: (at least the row tiles of all
    groups, column tiles); the group of a tile is determined on the device, so that the bounds are never copied to the host."""
    g = tl.arange(0, BLOCK_G)
    starts = tl.load(bounds + g, mask=g < groups, other=0)
    ends = tl.load(bounds + g + 1, mask=g < groups, other=0)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    until = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    group = tl.sum(tl.where((until <= tile) & (g < groups), 1, 0))
    if group >= groups:
        return
    inside = tile - tl.sum(tl.where(g < group, tiles, 0))
    row = tl.sum(tl.where(g == group, starts, 0)) + inside * BLOCK_M
    end = tl.sum(tl.where(g == group, ends, 0))
    own = w + group.to(tl.int64) * N * K
    _tile_of(x, own, w, out, row, end, tl.program_id(1) * BLOCK_N, N, K, False, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, WIDEN)
