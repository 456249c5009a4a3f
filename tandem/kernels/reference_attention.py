"""Attention in plain torch, whose bits depend on absolute positions alone (see ``reference``)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.api import BLOCK_TOKENS, KVLayer
from tandem.kernels.kv_dtype import decode
from tandem.kernels.reference_dtype import TILE_ROWS, compute_dtype, soft_cap


def gather(cache: KVLayer, table: Tensor, length: int, behind: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the first ``length`` keys and values, each [length, Hkv, D], of the blocks ``table[B]``; zeros for its first ``behind``
    blocks, which no query attends to and which may have been reused."""
    blocks = table[behind : -(-length // BLOCK_TOKENS)].long()
    skipped = behind * BLOCK_TOKENS
    key_scales = None if cache.key_scales is None else cache.key_scales[blocks].unsqueeze(2)
    value_scales = None if cache.value_scales is None else cache.value_scales[blocks].unsqueeze(3)
    keys = decode(cache.keys[blocks], key_scales, dtype, axis=2).permute(0, 3, 1, 2).flatten(0, 1)[: length - skipped]
    values = decode(cache.values[blocks], value_scales, dtype).permute(0, 2, 1, 3).flatten(0, 1)[: length - skipped]
    return F.pad(keys, (0, 0, 0, 0, skipped, 0)), F.pad(values, (0, 0, 0, 0, skipped, 0))


def attend(q: Tensor, k: Tensor, v: Tensor, first: int, scale: float, window: int | None, cap: float | None = None, sinks: Tensor | None = None) -> Tensor:
    """Computes attention of ``q[n, Hq, D]`` at positions ``first .. first + n - 1`` over ``k[first + n, Hkv, D]`` and ``v[first + n, Hkv, Dv]`` ->
    [n, Hq, Dv].

    A row that attends to a non-finite value is NaN; for other rows it counts as 0. Tile t holds the positions ``64 t .. 64 t + 63``: always
    a product of [Hkv, G 64, D] with [Hkv, D, 64 (t + 1)].
    """
    count, query_heads, size = q.shape
    kv_heads, group = k.shape[1], query_heads // k.shape[1]
    last = first + count
    end = -(-last // TILE_ROWS) * TILE_ROWS
    keys = F.pad(k, (0, 0, 0, 0, 0, end - last)).permute(1, 2, 0)
    values = F.pad(v, (0, 0, 0, 0, 0, end - last)).permute(1, 0, 2)
    wrong = None if bool(values.isfinite().all()) else ~values.isfinite()
    if wrong is not None:
        values = values.masked_fill(wrong, 0.0)
    tiles = []
    for tile in range(first // TILE_ROWS, end // TILE_ROWS):
        begin, width = tile * TILE_ROWS, (tile + 1) * TILE_ROWS
        low, high = max(first, begin), min(last, width)
        rows = F.pad(q[low - first : high - first], (0, 0, 0, 0, low - begin, width - high))
        rows = rows.view(TILE_ROWS, kv_heads, group, size).permute(1, 2, 0, 3).reshape(kv_heads, -1, size)
        scores = torch.bmm(rows, keys[:, :, :width].contiguous()) * scale
        if cap is not None:
            scores = soft_cap(scores.to(compute_dtype(q.dtype)), cap)
        at = torch.arange(begin, width, device=q.device).unsqueeze(1)
        seen = torch.arange(width, device=q.device).unsqueeze(0)
        hidden = seen > at
        if window is not None:
            hidden = hidden | (seen <= at - window)
        scores = scores.view(kv_heads, group, TILE_ROWS, width).masked_fill(hidden, -math.inf)
        scores = scores.to(compute_dtype(q.dtype))
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            column = sinks.to(scores.dtype).view(kv_heads, group, 1, 1).expand(-1, -1, TILE_ROWS, 1)
            weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :width]
        weights = weights.to(q.dtype).reshape(kv_heads, group * TILE_ROWS, width)
        out = torch.bmm(weights, values[:, :width].contiguous())
        if wrong is not None:
            sees = (~hidden).to(q.dtype).repeat(group, 1).expand(kv_heads, -1, -1)
            out = out.masked_fill(torch.bmm(sees, wrong[:, :width].to(q.dtype)) > 0, math.nan)
        out = out.view(kv_heads, group, TILE_ROWS, v.shape[2]).permute(2, 0, 1, 3).reshape(TILE_ROWS, query_heads, v.shape[2])
        tiles.append(out[low - begin : high - begin])
    return torch.cat(tiles)
