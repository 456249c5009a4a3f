"""Bindings of the C functions of attention: rotary embedding, the KV cache, and attention over it. See ``calls`` for conventions."""

from torch import Tensor, bfloat16, dtype, empty_like, float8_e4m3fn, float32, int8, int32, int64, uint8

from tandem.kernels.api import BLOCK_TOKENS, KVLayer, LatentLayer, PagedBatch
from tandem.kernels.cpu.calls import address, dense, indices, shape_error
from tandem.kernels.cpu.library import Library
from tandem.kernels.cpu.repeated_rows import RepeatedRows, addresses_of
from tandem.kernels.kv_dtype import stored_size

MAX_HEAD = 576
_STORED = {float32: 0, bfloat16: 1, int8: 2, float8_e4m3fn: 3, uint8: 4}
"""The codes of ``for_stored`` in cache.h."""


class AttentionCalls:
    """One method per C function."""

    def __init__(self, library: Library) -> None:
        self._c = library

    def rope(
        self, qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int],
        q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query_heads, kv_heads, size = heads
        tokens, positions, cos_sin = self._rope_inputs(qkv, positions, cos_sin, heads)
        q = qkv.new_empty(tokens, query_heads, size)
        k = qkv.new_empty(tokens, kv_heads, size)
        v = qkv.new_empty(tokens, kv_heads, size)
        code = self._c.rope(
            qkv.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), tokens, cos_sin.shape[0], query_heads, kv_heads, size,
            address(q_norm), address(k_norm), eps, q.data_ptr(), k.data_ptr(), v.data_ptr(),
        )  # fmt: skip
        if code:
            raise IndexError(f"rope: a position is outside 0..{len(cos_sin) - 1}")
        return q, k, v

    def rope_to_cache(
        self, qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int],
        q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cache: KVLayer, slots: Tensor,
    ) -> Tensor:
        query_heads, kv_heads, size = heads
        tokens, positions, cos_sin = self._rope_inputs(qkv, positions, cos_sin, heads)
        blocks, slots = cache.keys.shape[0], indices(slots, int64)
        addresses = cache_addresses(cache, kv_heads, size)
        if slots.shape[0] != tokens:
            raise shape_error("slots", slots, f"[{tokens}]")
        q = qkv.new_empty(tokens, query_heads, size)
        code = self._c.rope_to_cache(
            qkv.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), tokens, cos_sin.shape[0], query_heads, kv_heads, size,
            address(q_norm), address(k_norm), eps, q.data_ptr(), *addresses, blocks, slots.data_ptr(),
        )  # fmt: skip
        raise_for_rope(code, len(cos_sin), blocks)
        return q

    def round_kv(self, x: Tensor, stored: dtype) -> Tensor:
        if stored not in _STORED:
            raise TypeError(f"kernels cpu store keys and values in {', '.join(map(str, _STORED))}, not in {stored}")
        *_, size = x.shape
        if size > MAX_HEAD:
            raise shape_error("round_kv x", x, f"a head size up to {MAX_HEAD}")
        out = empty_like(x)
        self._c.round_kv(x.data_ptr(), _STORED[stored], x.numel() // size, size, out.data_ptr())
        return out

    def rope_backward(
        self, qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int],
        q_norm: Tensor | None, k_norm: Tensor | None, eps: float, grads: tuple[Tensor, Tensor, Tensor], same: RepeatedRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradient by qkv, like ``grads``, and ``[2, D]`` of the two norms. ``same``: the rows, of which ``qkv`` and ``grads`` have each once."""
        query_heads, kv_heads, size = heads
        count, rows = addresses_of(same, len(qkv))
        grad_qkv, grad_norms = qkv.new_empty(len(grads[0]), qkv.shape[1]), qkv.new_empty(2, size)
        self._c.rope_backward(
            qkv.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), *rows, count, query_heads, kv_heads, size,
            address(q_norm), address(k_norm), eps, *(g.data_ptr() for g in grads), grad_qkv.data_ptr(),
            grad_norms.data_ptr(),
        )  # fmt: skip
        return grad_qkv, grad_norms

    def _rope_inputs(
        self, qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int]
    ) -> tuple[int, Tensor, Tensor]:
        query_heads, kv_heads, size = heads
        tokens, width = qkv.shape
        if width != (query_heads + 2 * kv_heads) * size:
            raise shape_error("qkv", qkv, f"[T, {(query_heads + 2 * kv_heads) * size}]")
        if positions.shape[0] != tokens:
            raise shape_error("positions", positions, f"[{tokens}]")
        fits = cos_sin.shape[1] == size and size % 2 == 0 and size <= MAX_HEAD
        if not fits:
            raise shape_error("cos_sin", cos_sin, f"[P, {size}], an even size up to {MAX_HEAD}")
        return tokens, indices(positions, int64), dense(cos_sin)

    def packed_attention(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None,
        log_sum: Tensor | None, query_start: Tensor | None = None, cap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:
        queries, heads, size = q.shape
        tokens, kv_heads = (queries if query_start is None else k.shape[0]), k.shape[1]
        fits = k.shape == (tokens, kv_heads, size) and heads % kv_heads == 0
        if not fits:
            raise shape_error("attention k", k, f"[{tokens}, a divisor of {heads}, {size}]")
        if v.shape != k.shape:
            raise shape_error("attention v", v, f"{list(k.shape)}")
        bounds = indices(cu_seqlens, int32)
        starts = bounds if query_start is None else indices(query_start, int32)
        if len(starts) != len(bounds):
            raise shape_error("query_start", starts, f"[{len(bounds)}]")
        out = q.new_empty(queries, heads, size)
        code = self._c.packed_attention(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), bounds.data_ptr(), starts.data_ptr(), len(bounds) - 1, tokens, queries, heads, kv_heads,
            size, scale, window or 0, cap or 0.0, _sinks_address(sinks, heads), out.data_ptr(), address(log_sum),
        )  # fmt: skip
        if code == 1:
            raise ValueError(f"attention: head size {size} is above {MAX_HEAD}")
        if code:
            raise ValueError(f"attention: cu_seqlens must rise from 0 to {tokens}, the number of tokens, and query_start to {queries}, by no more")
        return out

    def packed_attention_backward(
        self, grad: Tensor, saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], cu_seqlens: Tensor, scale: float,
        window: int | None, query_start: Tensor | None = None, cap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes the gradients. ``saved``: q, k, v, out, log_sum."""
        q, k, v, out, log_sum = saved
        (_, heads, size), kv_heads, bounds = q.shape, k.shape[1], indices(cu_seqlens, int32)
        starts = bounds if query_start is None else indices(query_start, int32)
        grads = tuple(empty_like(x) for x in (q, k, v))
        self._c.packed_attention_backward(
            grad.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), log_sum.data_ptr(),
            bounds.data_ptr(), starts.data_ptr(), len(bounds) - 1, heads, kv_heads, size, scale, window or 0, cap or 0.0,
            *(g.data_ptr() for g in grads),
        )  # fmt: skip
        return grads[0], grads[1], grads[2]

    def sinks_backward(self, grad: Tensor, out: Tensor, log_sum: Tensor, sinks: Tensor) -> Tensor:
        """Returns the gradient by ``sinks[Hq]`` of the attention ``out[T, Hq, D]``, whose gradient is ``grad``."""
        by_sinks = empty_like(sinks)
        self._c.sinks_backward(grad.data_ptr(), out.data_ptr(), log_sum.data_ptr(), sinks.data_ptr(), *out.shape, by_sinks.data_ptr())
        return by_sinks

    def paged_attention(
        self, q: Tensor, cache: KVLayer, batch: PagedBatch, scale: float, window: int | None, cap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        blocks, kv_heads, size = *cache.keys.shape[:2], q.shape[2]
        addresses = cache_addresses(cache, kv_heads, size)
        return self._paged(q, addresses, (blocks, kv_heads), batch_indices(batch), scale, window, cap, sinks)

    def latent_attention(self, q: Tensor, cache: LatentLayer, batch: PagedBatch, scale: float) -> Tensor:
        """Computes attention over rows that are keys and values at once: [T, Hq, D] -> [T, Hq, D]."""
        blocks, (rows, scales), size = len(cache.rows), cache, q.shape[2]
        kind = _STORED.get(rows.dtype)
        if kind is None:
            raise TypeError(f"kernels cpu store keys and values in one of {', '.join(map(str, _STORED))}, not in {rows.dtype}")
        if not rows.is_contiguous() or rows.shape != (blocks, BLOCK_TOKENS, size):
            raise shape_error("cache rows", rows, f"dense [N, {BLOCK_TOKENS}, {size}]")
        if kind > 1 and (scales is None or not scales.is_contiguous() or scales.dtype is not float32 or scales.shape != (blocks, BLOCK_TOKENS)):
            raise TypeError(f"a cache of {rows.dtype} has no dense fp32 scales [{blocks}, {BLOCK_TOKENS}]; make it with empty_latent_cache")
        return self._paged(q, (kind, 0, rows.data_ptr(), 0, address(scales)), (blocks, 1), batch_indices(batch), scale, None, None, None)

    def _paged(
        self, q: Tensor, addresses: tuple[int, int, int, int, int], sizes: tuple[int, int], batch: tuple[Tensor, Tensor, Tensor], scale: float,
        window: int | None, cap: float | None, sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        (tokens, heads, size), (blocks, kv_heads), (starts, lengths, tables) = q.shape, sizes, batch
        out = q.new_empty(tokens, heads, size)
        code = self._c.paged_attention(
            q.data_ptr(), *addresses, tokens, blocks, heads, kv_heads, size, starts.data_ptr(), lengths.data_ptr(),
            tables.data_ptr(), *tables.shape, scale, window or 0, cap or 0.0, _sinks_address(sinks, heads), out.data_ptr(),
        )  # fmt: skip
        raise_for_attention(code, size, blocks)
        return out


def raise_for_rope(code: int, positions: int, blocks: int) -> None:
    """Raises what the ``code`` of ``rope_to_cache`` means."""
    if code == 1:
        raise IndexError(f"rope_to_cache: a position is outside 0..{positions - 1}")
    if code == 2:
        raise IndexError(f"rope_to_cache: a slot is outside the cache of {blocks} blocks")


def raise_for_attention(code: int, size: int, blocks: int) -> None:
    """Raises what the ``code`` of ``paged_attention`` means."""
    if code == 1:
        raise ValueError(f"attention: head size {size} is above {MAX_HEAD}")
    if code == 2:
        raise ValueError("attention: query_start and context_lens do not match the tokens or the block tables")
    if code == 3:
        raise IndexError(f"attention: a block table names a block outside the cache of {blocks} blocks")


def _sinks_address(sinks: Tensor | None, heads: int) -> int:
    if sinks is None:
        return 0
    if sinks.shape != (heads,):
        raise shape_error("attention sinks", sinks, f"[{heads}]")
    return dense(sinks).data_ptr()


def batch_indices(batch: PagedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the starts, lengths and block tables of ``batch`` as the library reads them."""
    starts, lengths = indices(batch.query_start, int32), indices(batch.context_lens, int32)
    tables = indices(batch.block_tables, int32)
    sequences = len(tables)
    if lengths.shape[0] != sequences:
        raise shape_error("context_lens", lengths, f"[{sequences}]")
    if starts.shape[0] != sequences + 1:
        raise shape_error("query_start", starts, f"[{sequences + 1}]")
    return starts, lengths, tables


def cache_addresses(cache: KVLayer, kv_heads: int, size: int) -> tuple[int, int, int, int, int]:
    """Returns the code of a cache's dtype and the addresses of its four tensors (0 for one that it does not have)."""
    keys, values, key_scales, value_scales = cache
    blocks, kind = keys.shape[0], _STORED.get(keys.dtype)
    if kind is None or values.dtype is not keys.dtype:
        raise TypeError(f"kernels cpu store keys and values in one of {', '.join(map(str, _STORED))}, not in {keys.dtype} and {values.dtype}")
    size = stored_size(size, keys.dtype)
    if not keys.is_contiguous() or keys.shape != (blocks, kv_heads, size, BLOCK_TOKENS):
        raise shape_error("cache keys", keys, f"dense [N, {kv_heads}, {size}, {BLOCK_TOKENS}]")
    if not values.is_contiguous() or values.shape != (blocks, kv_heads, BLOCK_TOKENS, size):
        raise shape_error("cache values", values, f"dense [{blocks}, {kv_heads}, {BLOCK_TOKENS}, {size}]")
    if kind < 2:
        return kind, keys.data_ptr(), values.data_ptr(), 0, 0
    for scales in (key_scales, value_scales):
        if scales is None:
            raise TypeError(f"a cache of {keys.dtype} has no scales; make it with empty_cache")
        if not scales.is_contiguous() or scales.dtype is not float32 or scales.shape != (blocks, kv_heads, BLOCK_TOKENS):
            raise shape_error("cache scales", scales, f"dense fp32 [{blocks}, {kv_heads}, {BLOCK_TOKENS}]")
    return kind, keys.data_ptr(), values.data_ptr(), address(key_scales), address(value_scales)
