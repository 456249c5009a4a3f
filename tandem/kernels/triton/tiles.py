"""Tile sizes as plain data: a function of the device's generation, the dtype and the sizes of the model, and of the batch only where it
cannot change a bit."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class LinearTile(NamedTuple):
    """Rows, columns and k of a tile; ``warps`` and pipeline ``stages`` of its program."""

    rows: int
    columns: int
    k: int
    warps: int
    stages: int


class LatentTile(NamedTuple):
    """Rows and keys of a tile of attention whose values are narrower than its keys; ``warps`` and pipeline ``stages`` of its program."""

    rows: int
    keys: int
    warps: int
    stages: int


_LATENT = LatentTile(16, 16, 8, 1)


@dataclass(frozen=True, slots=True)
class Tiles:
    """``attention_rows`` x ``attention_keys``: a tile of scores. ``split``: absolute positions that are summed from zero. ``linear``: the
    smallest tile first; all of them must give an output the same bits. ``vocabulary``: ids per block of a row of logits. ``backward``: rows
    and keys of a tile of attention's gradients. ``tall_rows``, ``tall_warps``: of attention's tile where sequences have rows enough (0: none
    such); a row keeps its bits. ``latent``, ``latent_backward``: tiles of latent attention and of its gradients."""

    attention_rows: int
    attention_keys: int
    split: int
    linear: tuple[LinearTile, ...]
    vocabulary: int = 2048
    backward: int = 32
    attention_warps: int = 4
    attention_stages: int = 2
    tall_rows: int = 0
    tall_warps: int = 8
    latent: LatentTile = _LATENT
    latent_backward: LatentTile = _LATENT


_HALF = (LinearTile(64, 32, 128, 4, 6), LinearTile(64, 64, 128, 4, 4), LinearTile(64, 256, 64, 4, 4), LinearTile(128, 256, 64, 8, 3))
"""Chosen by ``benchmarks/tiles_gpu.py`` on an H200 (``benchmarks/results/tiles-gpu-2026-11-27.md``)."""
_FULL = (LinearTile(16, 32, 64, 4, 3), LinearTile(64, 64, 32, 8, 3))
INTERPRETED = Tiles(32, 32, 64, (LinearTile(16, 32, 64, 4, 1), LinearTile(32, 64, 64, 4, 1)), 256)
"""Small tiles: in the interpreter a test's sequences are short and must still have several tiles and splits."""


def tiles_for(dtype: torch.dtype) -> Tiles:
    """Returns the tiles for ``dtype``. In 16 bits tiles of 64 rows and more are multiplied by the same instruction, whose k is 16; this
    includes decoding a single row, which is bound by memory however many rows are padded."""
    if dtype in (torch.bfloat16, torch.float16):
        return Tiles(64, 64, 256, _HALF, backward=64, tall_rows=128, latent=LatentTile(64, 32, 8, 2), latent_backward=LatentTile(32, 32, 8, 1))
    return Tiles(32, 32, 256, _FULL, attention_warps=8, attention_stages=1)


def linear_tile(tiles: tuple[LinearTile, ...], rows: int, columns: int, processors: int) -> LinearTile:
    """Returns the largest tile that is not taller than the batch and of which there are enough for every multiprocessor, else the smallest."""
    for tile in reversed(tiles):
        if tile.rows <= max(rows, tiles[0].rows) and -(-rows // tile.rows) * -(-columns // tile.columns) >= processors:
            return tile
    return tiles[0]
