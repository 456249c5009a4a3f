"""The compressed cache of latent attention: one row for a token and layer, which all heads read as their key, and its first numbers as their value.

Rows are in the order of tokens, because they are values too; the kernels transpose those of a block where they need keys. They are written in plain torch for
every set of kernels, with the codes of ``kv_dtype``: a row is one head with one scale.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.api import LatentLayer, untouched_zeros
from tandem.kernels.kv_dtype import decode, encode, is_scaled
from tandem.types.kv_cache import BLOCK_TOKENS


def empty_latent_cache(blocks: int, size: int, layers: int, dtype: torch.dtype, device: torch.device) -> list[LatentLayer]:
    """Returns a zeroed cache of ``blocks`` blocks of rows of ``size`` numbers for each of ``layers``, with scales if ``dtype`` needs them."""

    def layer() -> LatentLayer:
        scales = untouched_zeros((blocks, BLOCK_TOKENS), torch.float32, device) if is_scaled(dtype) else None
        return LatentLayer(untouched_zeros((blocks, BLOCK_TOKENS, size), dtype, device), scales)

    return [layer() for _ in range(layers)]


def attend_wide(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    """Returns ``Kernels.packed_attention`` with fewer numbers in a value than in a key, by kernels that know no such values: zeros are put behind them, and
    their results are dropped. Columns of a result do not depend on each other, so the others keep their bits."""
    return attention(q, k, torch.nn.functional.pad(v, (0, k.shape[2] - v.shape[2])), *rest)[..., : v.shape[2]]


@torch.no_grad()
def write_rows(cache: LatentLayer, rows: Tensor, slots: Tensor) -> None:
    """Writes ``rows[T, D]`` to their ``slots[T]`` int64 of the cache, encoded as its dtype."""
    codes, scales = encode(rows, cache.rows.dtype)
    # torch copies no float8 by index on a CPU, but bytes.
    is_byte = codes.dtype.itemsize == 1
    held, own = (x.view(torch.uint8) if is_byte else x for x in (cache.rows, codes))
    held.view(-1, held.shape[-1]).index_copy_(0, slots, own)
    if cache.scales is not None and scales is not None:
        cache.scales.view(-1).index_copy_(0, slots, scales)


def read_rows(cache: LatentLayer, table: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Returns the first ``length`` rows [length, D] of the blocks ``table[B]`` in ``dtype``."""
    blocks = table[: -(-length // BLOCK_TOKENS)].long()
    scales = None if cache.scales is None else cache.scales[blocks].unsqueeze(-1)
    return decode(cache.rows[blocks], scales, dtype).flatten(0, 1)[:length]
