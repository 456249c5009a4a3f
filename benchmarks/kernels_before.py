"""Two builds of the C++ kernels in turn in one process: CPU time of attention in a decoding step and of products with few rows, and whether their bits agree.

One thread. Attention: a call for every layer, so that each finds its keys and values in memory and not in the cache, of sequences whose lengths are spread
evenly from 33 to 160 tokens; blocks are in shuffled order. Products: all matrices of the 84M model, one after the other. The library of another commit lies
in ``~/.cache/tandem/kernels`` once that commit has run.

    python benchmarks/kernels_before.py --before ~/.cache/tandem/kernels/kernels-DIGEST.so [--rounds 40]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from machine import machine
from torch import Tensor

from tandem.kernels import PagedBatch, empty_cache
from tandem.kernels.cpu.build import built_library, default_directory
from tandem.kernels.cpu.kernels import CpuKernels
from tandem.kernels.cpu.library import Library
from tandem.model.quantization.scheme import pack_weight, scheme_named

Call = Callable[[CpuKernels], list[Tensor]]
MATRICES = [(1280, 768), (768, 768), (4096, 768), (768, 2048)] * 12


class Decoding(NamedTuple):
    """``sequences`` with one query each; ``heads`` are (query heads, key-value heads, head size)."""

    name: str
    sequences: int
    layers: int
    heads: tuple[int, int, int]
    lengths: tuple[int, int] = (33, 160)
    dtype: torch.dtype = torch.float32


CASES = [
    Decoding("3.7M", 64, 4, (4, 2, 64)),
    Decoding("84M", 64, 12, (12, 4, 64)),
    Decoding("84M, cache in bf16", 64, 12, (12, 4, 64), dtype=torch.bfloat16),
    Decoding("heads of 0.5B", 64, 8, (14, 2, 64)),
    Decoding("heads of 0.5B, one at 2k", 1, 8, (14, 2, 64), (2048, 2048)),
]


def attention(case: Decoding) -> Call:
    query_heads, kv_heads, size = case.heads
    lengths = torch.linspace(*case.lengths, case.sequences).int()
    each = case.lengths[1] // 16 + 1
    caches = empty_cache((case.sequences * each, kv_heads, size), case.layers, case.dtype, torch.device("cpu"))
    for tensor in (tensor for cache in caches for tensor in cache.tensors()):
        tensor.copy_(torch.randn(tensor.shape))
    tables = torch.randperm(case.sequences * each).view(case.sequences, each).int()
    batch = PagedBatch(torch.arange(case.sequences + 1).int(), lengths, tables, torch.empty(0, dtype=torch.int64))
    q = torch.randn(case.sequences, query_heads, size)
    return lambda kernels: [kernels.paged_attention(q, cache, batch, size**-0.5, None) for cache in caches]


def products(kind: str, rows: int) -> Call:
    kernels = CpuKernels(Library(built_library("g++", default_directory())))
    weights = [pack_weight(kernels, torch.randn(shape), scheme_named(kind)) for shape in MATRICES]
    inputs = {width: torch.randn(rows, width) for _, width in MATRICES}
    return lambda kernels: [kernels.linear_packed(inputs[weight.columns], weight, None) for weight in weights]


def compared(call: Call, before: CpuKernels, after: CpuKernels, rounds: int) -> list[str]:
    """Returns the cells of best and median milliseconds of both, and of their ratios. Raises ``SystemExit`` where the bits differ."""
    if not all(torch.equal(one, other) for one, other in zip(call(before), call(after), strict=True)):
        raise SystemExit("the two libraries give other bits")
    took: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for kernels, own in zip((before, after), took, strict=True):
            start = time.process_time()
            call(kernels)
            own.append(1e3 * (time.process_time() - start))
    (best, median), (own_best, own_median) = ((min(own), statistics.median(own)) for own in took)
    return [f"{best:.2f} / {median:.2f}", f"{own_best:.2f} / {own_median:.2f}", f"{best / own_best:.2f} / {median / own_median:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="the library of another commit")
    parser.add_argument("--rounds", type=int, default=40, help="calls of each")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before, after = CpuKernels(Library(options.before)), CpuKernels(Library(built_library("g++", default_directory())))
    print(f"{machine()}\n\n| what | before, ms best / median | after | before / after |\n| --- | --- | --- | --- |", flush=True)
    calls = {f"attention, {case.name}": attention(case) for case in CASES}
    calls |= {f"products in {kind}, {rows} rows": products(kind, rows) for kind in ("int4", "int8") for rows in (1, 2, 4, 8)}
    with torch.inference_mode():
        for name, call in calls.items():
            print(f"| {' | '.join([name, *compared(call, before, after, options.rounds)])} |", flush=True)


if __name__ == "__main__":
    main()
