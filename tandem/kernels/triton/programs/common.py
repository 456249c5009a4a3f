"""Functions shared by several programs."""

import triton
import triton.language as tl

SILU, GELU, SWIGLU = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""The codes of an MLP's activation."""
ALPHA, LIMIT = tl.constexpr(1.702), tl.constexpr(7.0)
"""Of the clamped SwiGLU."""


@triton.jit
def product(a, b, acc, WIDEN: tl.constexpr):
    """Computes ``acc[M, N] + a[M, K] @ b[K, N]`` with fp32 sums. ``WIDEN``: Triton's interpreter does not multiply bf16."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def sequence_of(place, starts, count, SHIFT: tl.constexpr):
    """Returns the sequence s of tile ``place``, where the tiles of ``SHIFT`` rows of s begin at ``starts[s] // SHIFT + s``: one more tile
    than the rows need, so that no two sequences share a tile and tiles need not be counted first."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) // SHIFT + middle <= place:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def tile_of(starts, sequences, SHIFT: tl.constexpr):
    """Returns this program's tile of ``SHIFT`` rows: its sequence s, where s starts, the number of rows of s, and the first row of the tile
    (past the last for the surplus tile)."""
    place = tl.program_id(0)
    s = sequence_of(place, starts, sequences, SHIFT)
    start = tl.load(starts + s)
    return s, start, tl.load(starts + s + 1) - start, (place - (start // SHIFT + s)) * SHIFT


@triton.jit
def group_rows(
    first, start, count, head, query_heads, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Returns the rows of ``BLOCK_M // GROUP_ROWS`` tokens from ``first`` on, of a sequence of ``count`` tokens that starts at ``start``,
    times the query heads of key-value head ``head``: the rows' tokens [BLOCK_M], which of them are valid, their indices in ``[T, Hq]``, and
    their offsets and mask [BLOCK_M, BLOCK_D] in ``[T, Hq, D]``."""
    rows = tl.arange(0, BLOCK_M)
    token = first + rows // GROUP_ROWS
    member = rows % GROUP_ROWS
    is_row = (token < count) & (member < GROUP)
    at = (start + token).to(tl.int64) * query_heads + head * GROUP + member
    d = tl.arange(0, BLOCK_D)
    return token, is_row, at, at[:, None] * D + d[None, :], is_row[:, None] & (d < D)[None, :]


@triton.jit
def sequence_with(token, starts, count):
    """Returns the sequence of row ``token``: the last that starts at or before it."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) <= token:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def heads_of_token(query_heads, kv_heads, BLOCK_H: tl.constexpr):
    """Returns this program's token and the ``BLOCK_H`` heads of its fused projection, the number of heads, and which of them are queries,
    keys and values. Grid: (T, head tiles)."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    all_heads = query_heads + 2 * kv_heads
    is_query = heads < query_heads
    is_key = (heads >= query_heads) & (heads < query_heads + kv_heads)
    is_value = (heads >= query_heads + kv_heads) & (heads < all_heads)
    return token, heads, all_heads, is_query, is_key, is_value


@triton.jit
def rotation(positions, cos_sin, token, h, in_half, D: tl.constexpr):
    """Returns the cosines and sines [1, HALF] of the rotation of ``token``."""
    position = tl.load(positions + token).to(tl.int64)
    cos = tl.load(cos_sin + position * D + h, mask=in_half, other=0.0)[None, :]
    sin = tl.load(cos_sin + position * D + D // 2 + h, mask=in_half, other=0.0)[None, :]
    return cos, sin


@triton.jit
def decode_fp8(codes):
    """Decodes ``codes`` uint8 of e4m3 to fp32, exactly. Its bits are those of an fp16 whose exponent bias is 8 larger."""
    wide = codes.to(tl.int16)
    half = ((wide & 0x7F) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    value = tl.where((wide & 0x80) != 0, -half, half)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def encode_fp8(x):
    """Encodes fp32 ``x`` of magnitude at most 448 to uint8 codes of e4m3, rounded to nearest, ties to even."""
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)
    # Below 2^-6 codes are integer multiples of 2^-9. Adding 2^23 rounds to an integer.
    steps = (tl.abs(x) * 512.0 + 8388608.0) - 8388608.0
    code = tl.where(bits < 0x3C800000, steps.to(tl.int32), normal)
    return tl.where(x.to(tl.int32, bitcast=True) < 0, code | 0x80, code).to(tl.uint8)


@triton.jit
def encode_int8(x):
    """Encodes fp32 ``x`` of magnitude at most 127 to int8, rounded to nearest, ties to even."""
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def decode_int4(pairs, is_high):
    """Decodes one of the two codes in each of ``pairs`` uint8 to fp32: that of the high bits where ``is_high``."""
    wide = pairs.to(tl.int32)
    return (tl.where(is_high, wide >> 4, wide & 15) - 8).to(tl.float32)


@triton.jit
def capped(x, CAP: tl.constexpr):
    """Returns ``CAP tanh(x / CAP)``: near 0 by the polynomial of Cephes' tanhf (Moshier, 1989), else ``1 - 2 / (exp(2 |y|) + 1)`` with the sign of y."""
    y = tl.div_rn(x, tl.full(x.shape, CAP, tl.float32))
    square = y * y
    p = tl.fma(tl.full(x.shape, -5.70498872745e-3, tl.float32), square, tl.full(x.shape, 2.06390887954e-2, tl.float32))
    p = tl.fma(p, square, tl.full(x.shape, -5.37397155531e-2, tl.float32))
    p = tl.fma(p, square, tl.full(x.shape, 1.33314422036e-1, tl.float32))
    p = tl.fma(p, square, tl.full(x.shape, -3.33332819422e-1, tl.float32))
    near = tl.fma(p * square, y, y)
    size = tl.abs(y)
    far = 1.0 - tl.div_rn(tl.full(x.shape, 2.0, tl.float32), tl.exp(size + size) + 1.0)
    return tl.where(size < 0.625, near, tl.where(y < 0, -far, far)) * CAP


@triton.jit
def cap_slope(value, CAP: tl.constexpr):
    """Returns the slope of ``capped`` where it is ``value``."""
    share = value / CAP
    return 1.0 - share * share


@triton.jit
def swiglu_bounds(gate, up, LIMIT: tl.constexpr):
    """Returns the gate up to ``LIMIT`` and up between ``-LIMIT`` and ``LIMIT``; NaN stays NaN."""
    return tl.where(gate > LIMIT, LIMIT, gate), tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))


@triton.jit
def gelu_inner(x):
    """Returns ``2 sqrt(2 / pi) (x + 0.044715 x^3)``, whose sigmoid GELU by tanh (Hendrycks and Gimpel, 2016) multiplies x with."""
    return 1.5957691216057308 * (x + 0.044715 * x * x * x)


@triton.jit
def not_finite(acc):
    """Returns whether a number of ``acc[M, N]`` is not finite."""
    return tl.max(tl.max(tl.where(tl.abs(acc) < float("inf"), 0, 1), 1), 0) > 0


@triton.jit
def without_spoiled(values, seen, total):
    """Returns ``values[N, D]`` with 0 for numbers that are not finite, and the sums ``total[M]``, NaN for rows that have ``seen[M, N]`` such a one."""
    finite = tl.abs(values.to(tl.float32)) < float("inf")
    spoiled = tl.max(tl.where(finite, 0, 1), 1)
    hit = tl.max(tl.where(seen & (spoiled[None, :] > 0), 1, 0), 1)
    return tl.where(finite, values, 0.0).to(values.dtype), tl.where(hit > 0, float("nan"), total)
