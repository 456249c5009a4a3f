"""Quantised linear layers beside fp32 ones and beside torch's own int8.

Linear layers, one thread: CPU microseconds of ours in fp32, int8 (weights and inputs), int4 (groups of 128), the same with inputs of 8 bits
(w4a8), fp8 (emulated in fp32: no processor multiplies it) and bf16 storage, and of torch's dynamic int8
(``torch.ops.quantized.linear_dynamic``, FBGEMM: its inputs are rounded with one scale for the whole batch) and MKL's fp32. Engines are
measured by ``quantization_formats.py``.

    python benchmarks/quantization.py [--seconds 0.3] [--out benchmarks/results]
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from machine import machine, write_report

from tandem.kernels import select
from tandem.model.quantization.scheme import pack_weight, scheme_named

SHAPES = [(4096, 1024), (1024, 4096), (2048, 512)]
ROWS = [1, 4, 8, 16, 64, 256]
KINDS = ["int8", "int4", "w4a8", "fp8", "bf16"]


def interleaved(calls: list[Callable[[], object]], seconds: float) -> list[float]:
    """The least CPU seconds of each call; the calls take turns for ``seconds``, and at least three times."""
    best = [float("inf")] * len(calls)
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 4 or time.perf_counter() < end:
        for i, call in enumerate(calls):
            repeat = max(1, min(50, int(2e-4 / best[i]))) if rounds else 1
            start = time.process_time()
            for _ in range(repeat):
                call()
            # The first round touches the memory.
            best[i] = min(best[i], (time.process_time() - start) / repeat) if rounds else 1.0
        rounds += 1
    return best


def torch_int8(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """torch's dynamic int8 linear layer, with a scale for each output channel."""
    scales = weight.abs().amax(1) / 127
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    packed = torch.ops.quantized.linear_prepack(torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8), None)
    run: Callable[[torch.Tensor], torch.Tensor] = lambda x: torch.ops.quantized.linear_dynamic(x, packed, False)
    return run


def linears(seconds: float) -> list[str]:
    kernels = select("cpu")
    head = ["N x K", "rows", "MKL fp32", "fp32", *KINDS, "torch int8", "fp32 / int8", "torch int8 / int8", "MKL / int8"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for columns, width in SHAPES:
        weight = torch.randn(columns, width)
        plain, peer = kernels.pack(weight), torch_int8(weight)
        packed = [pack_weight(kernels, weight, scheme_named(kind)) for kind in KINDS]
        for rows in ROWS:
            x = torch.randn(rows, width)
            calls: list[Callable[[], object]] = [lambda x=x, w=weight: F.linear(x, w)]
            calls += [lambda x=x, w=w: kernels.linear_packed(x, w, None) for w in (plain, *packed)]
            best = [1e6 * s for s in interleaved([*calls, lambda x=x, run=peer: run(x)], seconds)]
            mkl, ours, int8, theirs = best[0], best[1], best[2], best[-1]
            cells = [f"{columns} x {width}", str(rows), *(f"{t:.0f}" for t in best)]
            cells += [f"{ours / int8:.2f}", f"{theirs / int8:.2f}", f"{mkl / int8:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each shape")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the report goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = ["# Quantised weights", "", machine(), "", *__doc__.split("\n\n")[1].split("\n"), ""]
    text += ["## Linear layers, CPU microseconds", "", *linears(options.seconds), ""]
    print(f"wrote {write_report('quantization', chr(10).join(text), options.out)}")


if __name__ == "__main__":
    main()
