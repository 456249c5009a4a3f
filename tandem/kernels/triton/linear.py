"""Launches matrix products, and selects their tiles."""

import torch
from torch import Tensor

from tandem.kernels.triton.launch import IS_INTERPRETED, UNFUSED, check, dense, power_of_two, processors
from tandem.kernels.triton.programs import linear as programs
from tandem.kernels.triton.tiles import LinearTile, linear_tile

_BAND = 8


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, tile: LinearTile) -> Tensor:
    """Computes ``x[T, K] @ weight[N, K].T + bias[N]`` with tiles of one size."""
    rows, width = x.shape
    check("linear weight", weight, None, width)
    check("linear x", x, None, width)
    x, weight = dense(x), dense(weight)
    columns = len(weight)
    out = x.new_empty(rows, columns)
    if not out.numel():
        return out
    count = -(-rows // tile.rows) * -(-columns // tile.columns)
    programs_at_once = min(count, processors(x.device))
    programs.linear[(programs_at_once,)](
        x, weight, weight if bias is None else dense(bias), out, rows, columns, width, programs_at_once,
        HAS_BIAS=bias is not None, BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.k, EVEN_K=width % tile.k == 0, BAND=_BAND,
        WIDEN=IS_INTERPRETED, num_warps=tile.warps, num_stages=tile.stages, **UNFUSED,
    )  # fmt: skip
    return out


def grouped_linear(x: Tensor, weight: Tensor, bounds: Tensor, tile: LinearTile) -> Tensor:
    """Runs ``Kernels.grouped_linear``."""
    rows, width = x.shape
    check("grouped linear weight", weight, None, None, width)
    check("grouped linear x", x, None, width)
    x, weight = dense(x), dense(weight)
    groups, columns, _ = weight.shape
    out = x.new_empty(rows, columns)
    if not out.numel():
        return out
    grid = (rows // tile.rows + groups, -(-columns // tile.columns))
    programs.grouped_linear[grid](
        x, weight, bounds, out, groups, columns, width,
        BLOCK_G=power_of_two(groups), BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.k, EVEN_K=width % tile.k == 0,
        WIDEN=IS_INTERPRETED, num_warps=tile.warps, num_stages=tile.stages, **UNFUSED,
    )  # fmt: skip
    return out


class LinearTiles:
    """The tile sizes that a device uses for a dtype. ``checks``: sizes that give an output other bits than the smallest one are left out;
    tested by the first product."""

    def __init__(self, tiles: tuple[LinearTile, ...], checks: bool) -> None:
        self._given, self._checks = tiles, checks
        self._agreeing: dict[tuple[torch.device, torch.dtype], tuple[LinearTile, ...]] = {}

    def choose(self, x: Tensor, columns: int) -> LinearTile:
        """Returns the tile for ``x[T, K]`` times ``columns`` columns."""
        return linear_tile(self.agreeing(x.device, x.dtype), len(x), columns, processors(x.device))

    def agreeing(self, device: torch.device, dtype: torch.dtype) -> tuple[LinearTile, ...]:
        """Returns the tiles that agree on ``device``, the smallest first."""
        if not self._checks:
            return self._given
        key = device, dtype
        if key not in self._agreeing:
            self._agreeing[key] = agreeing_tiles(self._given, device, dtype)
        return self._agreeing[key]


def agreeing_tiles(tiles: tuple[LinearTile, ...], device: torch.device, dtype: torch.dtype) -> tuple[LinearTile, ...]:
    """Returns those of ``tiles`` that give the bits of the first, tested on numbers of very different magnitudes."""
    # Generated on a CPU, so that every device is tested on the same numbers, whatever torch's default device is.
    numbers = torch.Generator("cpu").manual_seed(0)
    draw = lambda rows: torch.randn(rows, 328, generator=numbers, device="cpu")
    x, weight = ((draw(rows) * draw(rows).exp2()).to(device, dtype) for rows in (70, 96))
    expected = linear(x, weight, None, tiles[0])
    return tiles[:1] + tuple(tile for tile in tiles[1:] if torch.equal(linear(x, weight, None, tile), expected))
