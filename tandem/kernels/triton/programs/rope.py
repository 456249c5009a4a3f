"""Splits the fused projection, norms heads, applies rotary embedding (Su et al., 2021) and writes the cache in one pass."""

import triton
import triton.language as tl

from tandem.kernels.triton.programs.common import encode_fp8, encode_int8, heads_of_token, rotation


@triton.jit
def _coded(first, second, is_inner, CODES: tl.constexpr):
    """Returns codes for rows whose halves are ``first`` and ``second``, and the scale of each row (see ``kv_dtype``); of 4 bits, pairs for both halves."""
    most: tl.constexpr = 127.0 if CODES == 1 else 448.0 if CODES == 2 else 7.0
    finite = (tl.abs(first) < float("inf")) & (tl.abs(second) < float("inf"))
    is_whole = tl.min(tl.where(finite | ~is_inner, 1, 0), 1) > 0
    largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    scale = tl.maximum(tl.div_rn(largest, most + tl.zeros_like(largest)), 1.1754943508222875e-38)
    wide = scale[:, None] + tl.zeros_like(first)
    usable = is_whole[:, None]
    a = tl.where(usable, tl.div_rn(first, wide), 0.0)
    b = tl.where(usable, tl.div_rn(second, wide), 0.0)
    scale = tl.where(is_whole, scale, float("nan"))
    if CODES == 1:
        first_codes = encode_int8(a)
        second_codes = encode_int8(b)
    elif CODES == 3:
        pairs = (encode_int8(a).to(tl.int32) + 8) | ((encode_int8(b).to(tl.int32) + 8) << 4)
        first_codes = pairs.to(tl.uint8)
        second_codes = first_codes
    else:
        first_codes = encode_fp8(a)
        second_codes = encode_fp8(b)
    return first_codes, second_codes, scale


@triton.jit
def rope(
    qkv, positions, cos_sin, q_norm, k_norm, q, k, v, k_scales, v_scales, slots, eps, query_heads, kv_heads,
    HAS_NORM: tl.constexpr, TO_CACHE: tl.constexpr, CODES: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Processes ``BLOCK_H`` of the heads of one token of ``qkv[T, (Hq + 2 Hkv) D]``: queries to ``q[T, Hq, D]``, keys and values to ``k``
    and ``v`` [T, Hkv, D], or with ``TO_CACHE`` to their slot of a cache (see ``KVLayer``). ``HALF``: D / 2, padded. Grid: (T, head
    tiles)."""
    token, heads, all_heads, is_query, is_key, is_value = heads_of_token(query_heads, kv_heads, BLOCK_H)
    h = tl.arange(0, HALF)
    is_inner = (h < D // 2)[None, :] & (heads < all_heads)[:, None]
    at = qkv + (token * all_heads + heads)[:, None] * D + h[None, :]
    first = tl.load(at, mask=is_inner, other=0).to(tl.float32)
    second = tl.load(at + D // 2, mask=is_inner, other=0).to(tl.float32)
    in_half = h < D // 2
    dtype: tl.constexpr = qkv.dtype.element_ty
    if HAS_NORM:
        mean = tl.sum(first * first + second * second, 1) / D
        rstd = (1.0 / tl.sqrt_rn(mean + eps))[:, None]
        q_first = tl.load(q_norm + h, mask=in_half, other=0).to(tl.float32)[None, :]
        q_second = tl.load(q_norm + D // 2 + h, mask=in_half, other=0).to(tl.float32)[None, :]
        k_first = tl.load(k_norm + h, mask=in_half, other=0).to(tl.float32)[None, :]
        k_second = tl.load(k_norm + D // 2 + h, mask=in_half, other=0).to(tl.float32)[None, :]
        # Rounded to the model's dtype, as a separate norm would.
        normed_first = (tl.where(is_query[:, None], q_first, k_first) * (first * rstd)).to(dtype).to(tl.float32)
        normed_second = (tl.where(is_query[:, None], q_second, k_second) * (second * rstd)).to(dtype).to(tl.float32)
        first = tl.where(is_value[:, None], first, normed_first)
        second = tl.where(is_value[:, None], second, normed_second)
    cos, sin = rotation(positions, cos_sin, token, h, in_half, D)
    turned_first = tl.where(is_value[:, None], first, first * cos - second * sin).to(dtype)
    turned_second = tl.where(is_value[:, None], second, second * cos + first * sin).to(dtype)
    to_q = q + (token * query_heads + heads)[:, None] * D + h[None, :]
    tl.store(to_q, turned_first, mask=is_inner & is_query[:, None])
    tl.store(to_q + D // 2, turned_second, mask=is_inner & is_query[:, None])
    if TO_CACHE:
        slot = tl.load(slots + token)
        block = slot // 16
        offset = slot % 16
        key_row = block * kv_heads + heads - query_heads
        value_row = key_row - kv_heads
        STORED: tl.constexpr = D // 2 if CODES == 3 else D
        to_k = k + key_row[:, None] * STORED * 16 + h[None, :] * 16 + offset
        to_v = v + (value_row * 16 + offset)[:, None] * STORED + h[None, :]
        if CODES == 0:
            first_out = turned_first.to(k.dtype.element_ty)
            second_out = turned_second.to(k.dtype.element_ty)
        else:
            first_out, second_out, scale = _coded(turned_first.to(tl.float32), turned_second.to(tl.float32), is_inner, CODES)
            tl.store(k_scales + key_row * 16 + offset, scale, mask=is_key)
            tl.store(v_scales + value_row * 16 + offset, scale, mask=is_value)
        tl.store(to_k, first_out, mask=is_inner & is_key[:, None])
        tl.store(to_v, first_out, mask=is_inner & is_value[:, None])
        if CODES != 3:
            tl.store(to_k + D // 2 * 16, second_out, mask=is_inner & is_key[:, None])
            tl.store(to_v + D // 2, second_out, mask=is_inner & is_value[:, None])
    else:
        key_head = heads - query_heads
        to_k = k + (token * kv_heads + key_head)[:, None] * D + h[None, :]
        to_v = v + (token * kv_heads + key_head - kv_heads)[:, None] * D + h[None, :]
        tl.store(to_k, turned_first, mask=is_inner & is_key[:, None])
        tl.store(to_k + D // 2, turned_second, mask=is_inner & is_key[:, None])
        tl.store(to_v, turned_first, mask=is_inner & is_value[:, None])
        tl.store(to_v + D // 2, turned_second, mask=is_inner & is_value[:, None])
