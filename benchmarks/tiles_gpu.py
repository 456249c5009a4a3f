"""The tiles of 16-bit matrix products on a GPU: every candidate of ``TILES`` and torch's product (cuBLAS), on the shapes of Qwen3 0.6B and 8B, and the four
that serve best together under the rule of ``tandem.kernels.triton.tiles.linear_tile``.

    PYTHONPATH=. python benchmarks/tiles_gpu.py        # needs torch, triton and a CUDA device; half a minute

Products are launched from a replayed CUDA graph over several copies of the weights, more than the device's cache holds. A candidate whose bits differ from the
first one's is named and left out.
"""

import itertools
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.nn.functional as F
from machine import machine, write_report
from options import parser
from torch import Tensor

from tandem.kernels.triton.launch import processors
from tandem.kernels.triton.linear import linear
from tandem.kernels.triton.tiles import LinearTile, linear_tile, tiles_for

DTYPE = torch.bfloat16
TILES = [LinearTile(*sizes) for sizes in (
    (64, 32, 128, 4, 4), (64, 16, 128, 4, 4), (64, 16, 128, 4, 6), (64, 16, 256, 4, 3), (64, 16, 256, 4, 4), (64, 32, 128, 4, 6), (64, 32, 256, 4, 3),
    (64, 64, 128, 4, 4), (64, 64, 64, 4, 6), (64, 128, 64, 4, 4), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4),
    (256, 128, 64, 8, 3), (256, 128, 64, 8, 4), (64, 256, 64, 4, 4),
)]  # fmt: skip
SHAPES = [(1024, 2048), (6144, 1024), (1024, 3072), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 1024)]
"""Columns and k."""
ROWS = (1, 64, 256, 8192)
CACHE_BYTES = 150e6

Case = tuple[int, int, int]
"""Rows, columns, k."""


def compile_tile(tile: LinearTile) -> None:
    """Compiles a tile's programs, so that others find them in Triton's cache."""
    for rows in (1, 64, 8192):
        linear(torch.zeros(rows, 1024, dtype=DTYPE, device="cuda"), torch.zeros(4096, 1024, dtype=DTYPE, device="cuda"), None, tile)
    torch.cuda.synchronize()


def seconds(call: Callable[[int], object], count: int) -> float:
    """Seconds of one of ``count`` calls, the best of three replays."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call(0)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                call(i)
    graph.replay()
    took = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end) / count)
    return min(took) * 1e-3


def measure(case: Case, weights: Sequence[Tensor]) -> tuple[dict[LinearTile, float], float, list[LinearTile]]:
    """Returns the seconds of each tile, those of torch, and the tiles with other bits."""
    rows, _, width = case
    x = torch.randn(rows, width, device="cuda").to(DTYPE)
    count = max(len(weights), 3 if rows > 1000 else 8)
    expected, took, differ = linear(x, weights[0], None, TILES[0]), dict[LinearTile, float](), []
    for tile in TILES:
        if (rows > 1000 and tile.columns < 64) or (rows <= 64 < tile.rows):
            continue
        if torch.equal(linear(x, weights[0], None, tile), expected):
            took[tile] = seconds(lambda i, tile=tile: linear(x, weights[i % len(weights)], None, tile), count)
        else:
            differ.append(tile)
    return took, seconds(lambda i: F.linear(x, weights[i % len(weights)]), count), differ


def best_together(took: dict[Case, dict[LinearTile, float]], multiprocessors: int) -> tuple[LinearTile, ...]:
    """Returns the four tiles with the least product of seconds."""
    ordered = sorted(TILES, key=lambda tile: (tile.rows * tile.columns, tile))
    return min(itertools.combinations(ordered, 4), key=lambda tiles: cost(took, tiles, multiprocessors))


def cost(took: dict[Case, dict[LinearTile, float]], tiles: tuple[LinearTile, ...], multiprocessors: int) -> float:
    """Returns the mean logarithm of the seconds; a tile that was not measured counts as a second."""
    chosen = (times.get(linear_tile(tiles, rows, columns, multiprocessors), 1.0) for (rows, columns, _), times in took.items())
    return sum(math.log(time) for time in chosen) / len(took)


def main() -> int:
    options = parser(__doc__ or "").parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device is found; run this on a machine with one")
    torch.manual_seed(0)
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_tile, TILES))
    own, count = tiles_for(DTYPE).linear, processors(torch.device("cuda", 0))
    took: dict[Case, dict[LinearTile, float]] = {}
    lines = ["| rows | columns | k | our tile | us | best tile | us | torch, us | ours / torch | tiles with other bits |",
             "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for columns, width in SHAPES:
        copies = max(1, min(12, int(CACHE_BYTES / (columns * width * 2))))
        weights = [torch.randn(columns, width, device="cuda").to(DTYPE) * 0.02 for _ in range(copies)]
        for rows in ROWS:
            if rows > 1000 and columns > 100_000:
                continue
            case = rows, columns, width
            took[case], theirs, differ = measure(case, weights)
            tile, best = linear_tile(own, rows, columns, count), min(took[case], key=lambda tile: took[case][tile])
            ours = took[case].get(tile, math.nan)
            cells = [rows, columns, width, tuple(tile), f"{ours * 1e6:.1f}", tuple(best), f"{took[case][best] * 1e6:.1f}", f"{theirs * 1e6:.1f}",
                     f"{ours / theirs:.2f}", len(differ)]  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
            print(lines[-1], flush=True)
    together = best_together(took, count)
    gain = math.exp(cost(took, own, count) - cost(took, together, count))
    text = "\n".join([
        "# Tiles of matrix products on a GPU", "", f"{torch.cuda.get_device_name()}. {machine()}", "", *(__doc__ or "").split("\n\n")[2:], "",
        f"Best together: {', '.join(str(tuple(tile)) for tile in together)}; {gain:.3f} times the speed of those in use.", "", *lines,
    ])  # fmt: skip
    print(f"wrote {write_report('tiles-gpu', text, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
