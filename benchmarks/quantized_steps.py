"""Decoding steps of a dense decoder in fp32, int8, w4a8 and int4: all layers in one call, and the same kernels one by one.

A random Qwen3 of 84 million parameters, or of the sizes of Qwen2.5-0.5B; each step has one token of 1 to 64 sequences of 64 tokens. Milliseconds of the
layers, without embedding and head: the least of many steps, kinds and ways in turn. CPU time at one thread, wall time at more. The bound is what the
layers' matrices take to be read from memory at the rate at which torch adds 256 MB up in the same run; llama.cpp's Q8_0 and Q4_K_M read a little more
than int8 and w4a8 (8.5 and 4.85 bits a weight).

    python benchmarks/quantized_steps.py [--model 84m|0.5b] [--threads 1] [--rows 1 2 4 8 64] [--steps 30] [--out benchmarks/results]
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import machine, write_report

from tandem.kernels import Kernels, PagedBatch, empty_cache, select
from tandem.layout.shapes import ModelShapes
from tandem.model.attention import PagedContext
from tandem.model.decoder import Decoder
from tandem.model.initialise import initialise
from tandem.model.quantization.scheme import scheme_named

MODELS = {
    "84m": ModelShapes("qwen3", 1024, 768, 10, 12, 4, 64, 2432, 256, True, qk_norm=True),
    "0.5b": ModelShapes("qwen3", 1024, 896, 24, 14, 2, 64, 4864, 256, True, qk_norm=False),
}
BITS = {"fp32": 32.0, "int8": 8.0, "w4a8": 4 + 40 / 128, "int4": 4 + 64 / 128}
"""Of a weight with its part of scales and zeros."""
CONTEXT, BLOCKS_EACH = 64, 8


class OneByOne:
    """The same kernels without their program of all layers."""

    def __init__(self, inner: Kernels) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def packed(shapes: ModelShapes, kernels: Any, kind: str) -> Decoder:
    decoder = Decoder(shapes, kernels)
    initialise(decoder, 0)
    decoder.quantization = None if kind == "fp32" else scheme_named(kind)
    decoder.pack()
    return decoder


def context(shapes: ModelShapes, rows: int) -> PagedContext:
    """A step of one token of each of ``rows`` sequences."""
    blocks, i32 = rows * BLOCKS_EACH, torch.int32
    caches = empty_cache((blocks, shapes.num_key_value_heads, shapes.head_dim), shapes.num_hidden_layers, torch.float32, torch.device("cpu"))
    slots = torch.arange(rows) * BLOCKS_EACH * 16 + CONTEXT - 1
    lengths, tables = torch.full((rows,), CONTEXT, dtype=i32), torch.arange(blocks, dtype=i32).view(rows, BLOCKS_EACH)
    return PagedContext(PagedBatch(torch.arange(rows + 1, dtype=i32), lengths, tables, slots), caches, None)


def memory_rate(clock: Callable[[], float]) -> float:
    """Returns the bytes a second that torch's threads read, at best of twenty."""
    numbers, best = torch.ones(64 << 20), float("inf")
    for _ in range(20):
        start = clock()
        numbers.sum()
        best = min(best, clock() - start)
    return numbers.nbytes / best


def least(decoders: dict[tuple[str, str], Decoder], shapes: ModelShapes, rows: int, steps: int, clock: Callable[[], float]) -> dict[tuple[str, str], float]:
    """Returns the least seconds of a step of each decoder, which take turns."""
    batch, tokens, positions = context(shapes, rows), torch.arange(rows), torch.full((rows,), CONTEXT - 1)
    best = dict.fromkeys(decoders, float("inf"))
    for _ in range(steps):
        for key, decoder in decoders.items():
            start = clock()
            decoder(tokens, positions, batch)
            best[key] = min(best[key], clock() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="84m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 64], help="sequences of a step")
    parser.add_argument("--steps", type=int, default=30, help="steps of each decoder and number of sequences")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the report goes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shapes, kernels, is_wall = MODELS[options.model], select("cpu"), options.threads > 1
    clock = time.perf_counter if is_wall else time.process_time
    ways: dict[str, Any] = {"one call": kernels, "one by one": OneByOne(kernels)}
    decoders = {(kind, way): packed(shapes, ways[way], kind) for kind in BITS for way in ways}
    width, heads, inner = shapes.hidden_size, shapes.num_attention_heads, shapes.intermediate_size
    attention = (heads + 2 * shapes.num_key_value_heads) * shapes.head_dim * width + heads * shapes.head_dim * width
    weights = shapes.num_hidden_layers * (attention + 3 * width * inner)
    rate = memory_rate(clock)
    head = ["sequences", "weights", "one call, ms", "one by one, ms", "fp32 / it", "int8 / it", "bound, ms", "share of the bound"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for rows in options.rows:
        best = least(decoders, shapes, rows, options.steps, clock)
        for kind, bits in BITS.items():
            own, bound = best[kind, "one call"], weights * bits / 8 / rate
            cells = [str(rows), kind, f"{1e3 * own:.2f}", f"{1e3 * best[kind, 'one by one']:.2f}", f"{best['fp32', 'one call'] / own:.2f}"]
            cells += [f"{best['int8', 'one call'] / own:.2f}", f"{1e3 * bound:.2f}", f"{bound / own:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    time_of = f"wall time, {options.threads} threads" if is_wall else "CPU time, one thread"
    text = ["# Decoding steps of quantized weights", "", machine(), "", *__doc__.split("\n\n")[1].split("\n"), ""]
    text += [f"{options.model}: {weights / 1e6:.0f} million weights of the layers, {time_of}; memory at {rate / 1e9:.0f} GB/s.", "", *lines, ""]
    name = f"quantized-steps-{options.model}-{options.threads}-threads"
    print(f"wrote {write_report(name, chr(10).join(text), options.out)}")


if __name__ == "__main__":
    main()
