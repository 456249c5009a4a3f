"""Launches the programs of attention whose values are narrower than its keys."""

from typing import Any

import torch
from torch import Tensor

from tandem.kernels.api import LatentLayer, PagedBatch
from tandem.kernels.triton.attention import LOG2_E
from tandem.kernels.triton.launch import IS_INTERPRETED, KV_CODES, UNFUSED, check, dense, places, power_of_two, stored_bytes
from tandem.kernels.triton.programs import latent_attention as programs
from tandem.kernels.triton.programs import latent_attention_backward as backward_programs
from tandem.kernels.triton.tiles import LatentTile, Tiles
from tandem.types import UserError

_MOST_VALUE, _MOST_REST = 512, 64
"""Numbers of a value, and of a row beside it, in DeepSeek-V2 and V3, with which the tiles fit into the shared memory of a Hopper GPU."""


def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, tiles: Tiles, log_total: Tensor | None = None) -> Tensor:
    """Runs ``Kernels.packed_attention`` of ``v[T, Hkv, V]`` with fewer numbers than ``k[T, Hkv, D]``. ``log_total``: as in ``attention.packed``."""
    check("attention k", k, len(q), None, q.shape[2])
    check("attention v", v, *k.shape[:2], None)
    starts = cu_seqlens.to(q.device)
    return _launch(q, dense(k), dense(v), None, starts, starts, starts, k.shape[1], v.shape[2], scale, tiles.latent, log_total, 0, paged=False)


def paged(q: Tensor, cache: LatentLayer, batch: PagedBatch, scale: float, value_size: int, tiles: Tiles) -> Tensor:
    """Runs ``Kernels.latent_attention``."""
    check("attention q", q, None, None, cache.rows.shape[2])
    rows, tables, codes = stored_bytes(cache.rows), dense(batch.block_tables), KV_CODES.get(cache.rows.dtype, 0)
    starts, lengths = batch.query_start, batch.context_lens
    return _launch(q, rows, rows, cache.scales, tables, starts, lengths, 1, value_size, scale, tiles.latent, None, codes, paged=True)


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_total: Tensor, cu_seqlens: Tensor, scale: float, tiles: Tiles
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients by ``q``, ``k`` and ``v`` of ``packed``, whose output ``out`` has the gradient ``grad``."""
    q, k, v, grad = (dense(x) for x in (q, k, v, grad))
    tokens, query_heads = q.shape[:2]
    kv_heads, sequences, tile = k.shape[1], len(cu_seqlens) - 1, tiles.latent_backward
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if not tokens or sequences < 1:
        return grads
    shape = _shape(query_heads // kv_heads, q.shape[2], v.shape[2], tile)
    inner = (out.float() * grad.float()).sum(-1)
    starts = cu_seqlens.to(q.device)
    sizes = sequences, query_heads, kv_heads, scale, scale * LOG2_E
    grid = (places(sequences, tokens, shape["GROUP"], tile.rows), kv_heads * shape["PARTS"])
    backward_programs.latent_queries[grid](q, k, v, grad, log_total, inner, starts, grads[0], *sizes, **shape)
    backward_programs.latent_keys[(tokens // tile.keys + sequences, kv_heads)](q, k, v, grad, log_total, inner, starts, *grads[1:], *sizes, **shape)
    return grads


def _launch(
    q: Tensor, k: Tensor, v: Tensor, scales: Tensor | None, tables: Tensor, starts: Tensor, lengths: Tensor, kv_heads: int, value_size: int, scale: float,
    tile: LatentTile, log_total: Tensor | None, codes: int, paged: bool,
) -> Tensor:  # fmt: skip
    q = dense(q)
    tokens, query_heads, size = q.shape
    if query_heads % kv_heads:
        raise ValueError(f"attention has {query_heads} query heads over {kv_heads} key-value heads; query heads must be a multiple of key-value heads")
    shape = _shape(query_heads // kv_heads, size, value_size, tile)
    out = q.new_empty(tokens, query_heads, value_size)
    sequences = len(starts) - 1
    if not tokens or sequences < 1:
        return out
    programs.latent_attention[(places(sequences, tokens, shape["GROUP"], tile.rows), kv_heads * shape["PARTS"])](
        q, k, v, k if scales is None else scales, tables, starts, lengths, out, out if log_total is None else log_total,
        sequences, tables.shape[1] if paged else 0, query_heads, kv_heads, scale * LOG2_E, KEEPS_TOTAL=log_total is not None, PAGED=paged, CODES=codes, **shape,
    )  # fmt: skip
    return out


def _shape(group: int, size: int, value_size: int, tile: LatentTile) -> dict[str, Any]:
    """Returns the constants of a launch. The ``group`` heads of a key-value head are divided into the fewest equal parts that fit into a tile."""
    value, rest = (max(16, power_of_two(n)) for n in (value_size, size - value_size))
    if (value > _MOST_VALUE or rest > _MOST_REST) and not IS_INTERPRETED:
        raise UserError(
            f"attention has keys of {size} numbers and values of {value_size}; on a GPU kernels triton have tiles for values of up to {_MOST_VALUE} and up to "
            f"{_MOST_REST} numbers of a key beside them; compute this model on a CPU"
        )
    parts = next(n for n in range(1, group + 1) if group % n == 0 and power_of_two(group // n) <= tile.rows)
    return {
        "GROUP": group // parts, "GROUP_ROWS": power_of_two(group // parts), "PARTS": parts, "V": value_size, "D": size, "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys, "BLOCK_V": value, "BLOCK_R": rest, "WIDEN": IS_INTERPRETED, "num_warps": tile.warps, "num_stages": tile.stages, **UNFUSED,
    }  # fmt: skip
