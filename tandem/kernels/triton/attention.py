"""Launches the attention programs."""

import torch
from torch import Tensor

from tandem.kernels.api import BLOCK_TOKENS, KVLayer, PagedBatch
from tandem.kernels.triton.launch import IS_INTERPRETED, KV_CODES, UNFUSED, check, dense, places, power_of_two, processors, stored_bytes
from tandem.kernels.triton.programs import attention as programs
from tandem.kernels.triton.tiles import Tiles
from tandem.types import UserError

LOG2_E = 1.4426950408889634
_MOST_PARTIAL = 1 << 28
"""Maximum bytes of partial results of split attention."""
_MOST_BLOCK = 512
"""Compiled for Hopper in bf16, tiles of 1,024 numbers a row take 640 KiB of the 227 KiB of shared memory."""
_TALL_SIZE = 128
"""Larger heads leave no registers for tall tiles."""


def packed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None, tiles: Tiles, log_total: Tensor | None = None,
    cap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Runs ``Kernels.packed_attention``. ``log_total[T, Hq]`` fp32, if given, receives the base-2 logarithms of the sums of weights."""
    tokens, _, size = q.shape
    check("attention q", q, None, None, size)
    check("attention k", k, tokens, None, size)
    check("attention v", v, *k.shape)
    k, v = dense(k), dense(v)
    starts = cu_seqlens.to(q.device)
    return _launch(q, k, v, None, None, starts, starts, starts, k.shape[1], scale, window, tiles, None, log_total=log_total, cap=cap, sinks=sinks)


def paged(
    q: Tensor, cache: KVLayer, batch: PagedBatch, scale: float, window: int | None, tiles: Tiles, splits: bool | None, cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Runs ``Kernels.paged_attention``. ``splits``: one program for each split of the keys, or one for all (``None``: whichever fills the
    device); the bits are the same."""
    check("attention q", q, None, None, cache.keys.shape[2] * (2 if cache.keys.dtype == torch.uint8 else 1))
    keys, values = stored_bytes(cache.keys), stored_bytes(cache.values)
    width = batch.block_tables.shape[1]
    most = -(-width * BLOCK_TOKENS // tiles.split)
    tokens, query_heads, size = q.shape
    if splits is None:
        busy = places(len(batch.query_start) - 1, tokens, query_heads // keys.shape[1], tiles.attention_rows) * keys.shape[1]
        partial = tokens * query_heads * most * (size + 2) * 4
        splits = most > 1 and busy < 2 * processors(q.device) and partial <= _MOST_PARTIAL
    return _launch(
        q, keys, values, cache.key_scales, cache.value_scales, batch.query_start, batch.context_lens, dense(batch.block_tables),
        keys.shape[1], scale, window, tiles, most if splits else 0, KV_CODES.get(cache.keys.dtype, 0), cap=cap, sinks=sinks,
    )  # fmt: skip


def _launch(
    q: Tensor, k: Tensor, v: Tensor, k_scales: Tensor | None, v_scales: Tensor | None, starts: Tensor, lengths: Tensor, tables: Tensor,
    kv_heads: int, scale: float, window: int | None, tiles: Tiles, splits: int | None, codes: int = 0,
    log_total: Tensor | None = None, cap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Launches the program. ``splits``: ``None`` for packed keys; paged, 0 for one program over all splits, else the maximum number of
    programs."""
    q = dense(q)
    tokens, query_heads, size = q.shape
    if query_heads % kv_heads:
        raise ValueError(f"attention has {query_heads} query heads over {kv_heads} key-value heads; query heads must be a multiple of key-value heads")
    block_d = max(16, power_of_two(size))
    if block_d > _MOST_BLOCK and not IS_INTERPRETED:
        raise UserError(
            f"attention has heads of {size} numbers, whose tiles do not fit into the shared memory of a GPU with kernels triton; compute this model on a CPU"
        )
    if sinks is not None:
        check("attention sinks", sinks, query_heads)
        sinks = dense(sinks).float()
    out = torch.empty_like(q)
    sequences = len(starts) - 1
    if not tokens or sequences < 1:
        return out
    group = query_heads // kv_heads
    group_rows = power_of_two(group)
    rows, warps = max(tiles.attention_rows, group_rows), tiles.attention_warps
    if not splits and tiles.tall_rows and size <= _TALL_SIZE and tokens * group_rows >= sequences * tiles.tall_rows:
        rows, warps = max(tiles.tall_rows, group_rows), tiles.tall_warps
    shape = (tokens, query_heads, splits or 0)
    partial, partial_largest, partial_total = out, out, out
    if splits:
        partial = torch.empty(*shape, size, dtype=torch.float32, device=q.device)
        partial_largest, partial_total = torch.empty(2, *shape, dtype=torch.float32, device=q.device)
    grid = (places(sequences, tokens, group, rows), kv_heads, splits or 1)
    programs.attention[grid](
        q, k, v, k if k_scales is None else k_scales, v if v_scales is None else v_scales, tables, starts, lengths, out,
        out if log_total is None else log_total, partial, partial_largest, partial_total, out if sinks is None else sinks,
        sequences, 0 if splits is None else tables.shape[1], query_heads, kv_heads,
        scale * LOG2_E, splits or 0, KEEPS_TOTAL=log_total is not None, SINKS=sinks is not None,
        GROUP=group, GROUP_ROWS=group_rows, WINDOW=window or 0, CAP=(cap or 0.0) * LOG2_E, SPLIT=tiles.split, IS_SPLIT=bool(splits), PAGED=splits is not None,
        CODES=codes, D=size, BLOCK_M=rows, BLOCK_N=tiles.attention_keys, BLOCK_D=block_d, WIDEN=IS_INTERPRETED,
        num_warps=warps, num_stages=tiles.attention_stages, **UNFUSED,
    )  # fmt: skip
    if splits:
        heads = min(16, power_of_two(query_heads))
        programs.merge_splits[(tokens, -(-query_heads // heads))](
            partial, partial_largest, partial_total, out if sinks is None else sinks, starts, lengths, out, sequences, query_heads, splits,
            SINKS=sinks is not None, WINDOW=window or 0, SPLIT=tiles.split, D=size, BLOCK_H=heads, BLOCK_D=block_d, num_warps=4, **UNFUSED,
        )  # fmt: skip
    return out
