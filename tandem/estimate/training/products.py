"""Seconds of a matrix product on a GPU, by its shape. Imports no torch.

A GPU computes a product in tiles, one a multiprocessor at a time (NVIDIA, "Matrix Multiplication Background User's Guide"): tiles at the edges are computed
whole (tile quantisation), and the last wave of tiles takes as long as a full one (wave quantisation). The first operands of a tile are awaited and its
result is written before the next begins, which takes a time that does not shrink with faster tensor cores. A product is at least as long as reading its
operands and writing its result.
"""

import math

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.training.efficiency import Efficiency

TILES = ((256, 128), (128, 256), (128, 128), (64, 256), (64, 64))
"""Rows and columns of the tiles that libraries choose from; smaller ones read their operands more often."""
TILE_COST = {256 * 128: 1.0, 128 * 128: 1.06, 64 * 256: 1.1, 64 * 64: 1.4}
"""Time of a product in tiles of an area, against the largest, where the shape fits both."""


RESULT_BYTES = 2
"""Of an element of a product, written in 16 bits."""


def product_seconds(
    hardware: Hardware, precision: str, rows: int, columns: int, inner: int, given: Efficiency, count: int = 1, result_bytes: float = RESULT_BYTES,
    *, is_chance: bool = False,
) -> float:
    """Returns the seconds of ``count`` products of ``rows`` x ``inner`` with ``inner`` x ``columns`` that one kernel computes. ``result_bytes``: moved for an
    element of the result. ``is_chance``: ``rows`` is the mean of what chance gives each product."""
    rate = hardware.product_rate(precision) * given.products
    element = 1 if precision == "fp8" else 4 if precision == "fp32" else 2
    moved = count * (element * (rows * inner + inner * columns) + result_bytes * rows * columns)
    computed = min(_tiled_seconds(hardware, rows, columns, inner, count, rate, given, is_chance, *tile) for tile in TILES)
    return max(computed, moved / (hardware.memory_bandwidth * given.memory)) + given.kernel_s


def _tiled_seconds(
    hardware: Hardware, rows: int, columns: int, inner: int, count: int, rate: float, given: Efficiency, is_chance: bool, tile_rows: int, tile_columns: int
) -> float:
    """Returns the seconds of whole waves of whole tiles."""
    tiles = chance_tiles(rows, tile_rows) if is_chance else math.ceil(rows / tile_rows)
    waves = math.ceil(count * tiles * math.ceil(columns / tile_columns) / hardware.multiprocessors)
    area = tile_rows * tile_columns
    flops = 2.0 * area * inner * TILE_COST[area]
    return waves * (flops / (rate / hardware.multiprocessors) + given.tile_s * area / TILES[0][0] / TILES[0][1])


def chance_tiles(rows: int, tile_rows: int) -> float:
    """Returns the tiles that a number of rows needs on average which is normal around ``rows``, with the spread of a count: the sum over k of the chance that
    there are more than k tiles of them."""
    spread = math.sqrt(rows)
    surely = max(0, math.floor((rows - 5 * spread) / tile_rows))
    at_most = math.ceil((rows + 5 * spread) / tile_rows)
    return surely + sum(0.5 * math.erfc((k * tile_rows - rows) / (spread * math.sqrt(2))) for k in range(surely, at_most))
