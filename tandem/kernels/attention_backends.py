"""Attention of other packages, if installed and requested: FlashAttention 3 and 4, xFormers, and torch's own.

They compute packed attention: the trainer's, and whole prompts in the engine. None of them reads the layout of the engine's cache, so
decoding and continued prompts use the wrapped kernels. Bits then differ between trainer and engine, unless the backend rounds in the same
way: in deterministic mode it is tested before use, and refused if it differs. Scores with a soft cap, which not all of them have, and latent
attention are the wrapped kernels'.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.kernels.api import BLOCK_TOKENS, Kernels, KVLayer, PagedBatch, empty_cache
from tandem.kernels.last_queries import attend_last
from tandem.types import UserError

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, int, float, int | None], Tensor]
"""A differentiable ``packed_attention``."""


class _Backend(NamedTuple):
    module: str
    install: str
    make: Callable[[Any], Attention]


def _flash(module: Any) -> Attention:
    """Returns the attention of FlashAttention 3 (Shah et al., 2024) and its successor: (left, right) windows exclude a query's own key."""

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int | None) -> Tensor:
        left = (-1, -1) if window is None else (window - 1, 0)
        result = module.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen,
            softmax_scale=scale, causal=True, window_size=left,
        )  # fmt: skip
        # Some versions also return the log-sum-exp.
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return attend


def _flash_4(module: Any) -> Attention:
    """Does ``_flash`` with ``None`` for no window."""

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int | None) -> Tensor:
        left = (None, None) if window is None else (window - 1, 0)
        result = module.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, softmax_scale=scale, causal=True, window_size=left
        )
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return attend


def _xformers(module: Any) -> Attention:
    """Returns block-diagonal causal attention; key-value heads are repeated for their queries."""

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int | None) -> Tensor:
        bias = module.fmha.attn_bias.BlockDiagonalCausalMask.from_seqlens(cu_seqlens.diff().tolist())
        bias = bias if window is None else bias.make_local_attention(window)
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1).unsqueeze(0) for x in (k, v))
        out: Tensor = module.memory_efficient_attention(q.unsqueeze(0), keys, values, attn_bias=bias, scale=scale)
        return out.squeeze(0)

    return attend


def _torch(module: Any) -> Attention:
    """Returns torch's FlashAttention 2 (Dao, 2023), in 16 bits; a window excludes a query's own key. Where the function does not ask whether
    key-value heads are shared (torch 2.11 and 2.12), it takes shared ones as they are."""
    asks = "enable_gqa" in inspect.signature(module.varlen_attn).parameters

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int | None) -> Tensor:
        left = -1 if window is None else window - 1
        shared: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if asks else {}
        out: Tensor = module.varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scale, window_size=(left, 0), **shared)
        return out

    return attend


BACKENDS = {
    "flash3": _Backend("flash_attn_interface", "FlashAttention's hopper folder", _flash),
    "flash4": _Backend("flash_attn.cute.interface", "flash-attn-4", _flash_4),
    "torch": _Backend("torch.nn.attention.varlen", "torch 2.11 or later", _torch),
    "xformers": _Backend("xformers.ops", "xformers", _xformers),
}


def load_backend(name: str) -> Attention:
    """Returns the attention named ``name``. Raises ``UserError`` if the name is unknown or its package is not installed."""
    if name not in BACKENDS:
        raise UserError(f"attention is {name!r}; it must be one of auto, {', '.join(BACKENDS)}")
    backend = BACKENDS[name]
    try:
        return backend.make(importlib.import_module(backend.module))
    except ImportError as error:
        raise UserError(f"attention {name!r} cannot be imported ({error}); install {backend.install}, or set attention to auto") from None


def check_device(name: str, device: torch.device) -> None:
    """Raises ``UserError`` if ``device`` is not a GPU, which the backend ``name`` needs."""
    if device.type != "cuda":
        raise UserError(f"attention {name!r} needs a GPU and the device is '{device}'; set attention to auto")


def fast_attention(head_dim: int) -> str | None:
    """Returns the backend that trains fastest in 16 bits on a GPU with torch alone; ``None`` if torch has none for this head size."""
    if head_dim % 8 or head_dim > 256:
        return None
    try:
        given = inspect.signature(importlib.import_module(BACKENDS["torch"].module).varlen_attn).parameters
    except (ImportError, AttributeError):
        return None
    return "torch" if {"scale", "window_size"} <= set(given) else None


def with_attention(kernels: Kernels, name: str, dtype: torch.dtype, device: torch.device, deterministic: bool) -> Kernels:
    """Returns ``kernels`` with the packed attention of the backend ``name``. Raises ``UserError`` if it is unavailable, and in
    deterministic mode if it breaks the invariance law of ``api`` for ``dtype`` on ``device``."""
    attention = load_backend(name)
    broken = broken_law(kernels, attention, dtype, device) if deterministic else ""
    if broken:
        raise UserError(f"attention {name!r} is refused in deterministic mode: {broken}; set attention to auto, or deterministic to False")
    return _replaced(kernels, attention)


def _replaced(kernels: Kernels, attention: Attention) -> Kernels:
    """Returns ``kernels`` with another attention for packed sequences and for steps of whole prompts over a cache."""
    packed, paged = kernels.packed_attention, kernels.paged_attention
    checked: list[tuple[PagedBatch, int]] = []  # the last batch and its longest prompt, which every layer looks up

    def paged_attention(
        q: Tensor, cache: KVLayer, batch: PagedBatch, scale: float, window: int | None, cap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        if cap is not None or sinks is not None:
            return paged(q, cache, batch, scale, window, cap, sinks)
        # A step that only decodes has one token per sequence, which needs no device synchronization, so that CUDA graphs can capture it.
        if len(q) == len(batch.context_lens) or cache.keys.dtype != q.dtype:
            return paged(q, cache, batch, scale, window)
        if not checked or checked[0][0] is not batch:
            checked[:] = [(batch, longest_whole_prompt(batch))]
        longest = checked[0][1]
        if not longest:
            return paged(q, cache, batch, scale, window)
        block, offset = batch.slots // BLOCK_TOKENS, batch.slots % BLOCK_TOKENS
        keys, values = cache.keys[block, :, :, offset], cache.values[block, :, offset]
        return attention(q, keys.contiguous(), values.contiguous(), batch.query_start, longest, scale, window)

    def packed_attention(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int | None, query_start: Tensor | None = None,
        cap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if cap is not None or sinks is not None or v.shape[2] != k.shape[2]:
            return packed(q, k, v, cu_seqlens, max_seqlen, scale, window, query_start, cap, sinks)
        if query_start is not None:
            return attend_last(attention, q, k, v, cu_seqlens, max_seqlen, scale, window, query_start)
        return attention(q, k, v, cu_seqlens, max_seqlen, scale, window)

    functions: dict[str, Any] = {"packed_attention": staticmethod(packed_attention), "paged_attention": staticmethod(paged_attention)}
    # The program of all layers would compute the wrapped attention.
    functions["dense_program"] = None
    kind: Any = type("WithAttention", (type(kernels),), functions)
    changed: Kernels = kind.__new__(kind)
    vars(changed).update({name: value for name, value in vars(kernels).items() if name not in functions})
    return changed


def longest_whole_prompt(batch: PagedBatch) -> int:
    """Returns the tokens of the longest sequence if all sequences of ``batch`` are computed from their first token on, else 0."""
    lengths = batch.query_start.diff()
    return int(lengths.max()) if len(lengths) and torch.equal(lengths, batch.context_lens) else 0


@torch.no_grad()
def broken_law(kernels: Kernels, attention: Attention, dtype: torch.dtype, device: torch.device) -> str:
    """Returns how ``attention`` breaks the invariance law on a few sequences, in words; empty if it does not."""
    lengths, heads = [70, 5, 300], (4, 2, 64)
    total, (query_heads, kv_heads, size) = sum(lengths), heads
    numbers = torch.Generator("cpu").manual_seed(0)
    q, k, v = (torch.randn(total, count, size, generator=numbers, device="cpu").to(device, dtype) for count in (query_heads, kv_heads, kv_heads))

    def bounds(*ends: int) -> Tensor:
        return torch.tensor([0, *ends], dtype=torch.int32, device=device)

    scale = size**-0.5
    whole = attention(q, k, v, bounds(70, 75, 375), 300, scale, None)
    if not torch.equal(attention(q[75:], k[75:], v[75:], bounds(300), 300, scale, None), whole[75:]):
        return "the bits of a sequence depend on the other sequences in the batch"
    if not torch.equal(attention(q[75:275], k[75:275], v[75:275], bounds(200), 200, scale, None), whole[75:275]):
        return "the bits of a token depend on later tokens"
    own = q[75:], k[75:], v[75:]
    if not torch.equal(_decoded(kernels, *own, scale), whole[-1:]):
        return "the bits of a decoded token differ over the engine's cache"
    return ""


def _decoded(kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Returns the output of the last query over a cache of all keys and values."""
    tokens, kv_heads, size = k.shape
    blocks = -(-tokens // BLOCK_TOKENS)
    (cache,) = empty_cache((blocks, kv_heads, size), 1, q.dtype, q.device)
    at = torch.arange(tokens, device=q.device)
    cache.keys[at // BLOCK_TOKENS, :, :, at % BLOCK_TOKENS] = k
    cache.values[at // BLOCK_TOKENS, :, at % BLOCK_TOKENS] = v
    one = torch.tensor([0, 1], dtype=torch.int32, device=q.device)
    lengths = torch.tensor([tokens], dtype=torch.int32, device=q.device)
    table = torch.arange(blocks, dtype=torch.int32, device=q.device).unsqueeze(0)
    return kernels.paged_attention(q[-1:].contiguous(), cache, PagedBatch(one, lengths, table, at[-1:]), scale, None)
