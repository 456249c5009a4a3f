"""Measures matrix products and copies on this machine: in the process of a rank (``measure``), or in one of its own, which reads what to measure from standard
input and writes the answer as JSON, or is killed by ``SIGALRM`` where it takes longer than it may."""

import json
import mmap
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.config.trainer import TrainerConfig
from tandem.kernels import select
from tandem.kernels.api import Kernels
from tandem.kernels.mixed import in_precision
from tandem.runtime.process.fast_exit import fast_exit

MOST_ROWS, MOST_OUTPUTS, MOST_INPUTS = 1024, 8192, 16384
"""A larger product is measured at this size, and takes longer in proportion."""
COPIED_BYTES = 1 << 26
MEASURED_S, MOST_REPETITIONS = 0.05, 1000
QUICK_FLOPS, QUICK_BYTES = 1 << 28, 1 << 24
"""In a rank that waits to begin, larger products are measured with fewer columns, and smaller copies: a few milliseconds each."""


class Measured(NamedTuple):
    """Seconds and CPU-seconds of each product, and bytes per second, and CPU-second, that are read and written."""

    seconds: list[float]
    cpu_seconds: list[float]
    bytes_per_s: float
    bytes_per_cpu_s: float


class _Clocks(NamedTuple):
    wall: float
    cpu: float


def reduced_dtype(trainer: TrainerConfig, device: str) -> str:
    """Returns torch's name of the dtype of the tensors that the products of a run take: fp32 on a CPU, whatever their precision."""
    reduced = {"bf16": "bfloat16", "fp8": "bfloat16", "fp16": "float16"}.get(trainer.precision)
    return reduced if reduced and device == "cuda" else trainer.dtype


def measure(
    kernels: Kernels, products: Sequence[Sequence[Any]], dtype: torch.dtype, device: torch.device, *, quick: bool = False
) -> Measured:
    """Returns the speed of ``products``, (rows, outputs, inputs, whether with the backward pass)."""

    # The run's own random numbers go on as if nothing had been measured.
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=dtype)

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def best(run: Callable[[], Any], least: int) -> _Clocks:
        took: list[_Clocks] = []
        # The first product starts threads; the best of several is the one that no other process disturbed.
        while len(took) < least or (not quick and sum(each.wall for each in took) < MEASURED_S and len(took) < MOST_REPETITIONS):
            began, cpu = time.perf_counter(), time.process_time()
            run()
            finish()
            took.append(_Clocks(time.perf_counter() - began, time.process_time() - cpu))
        return _Clocks(min(each.wall for each in took[1:]), min(each.cpu for each in took[1:]))

    def one(rows: int, outputs: int, inputs: int, trains: bool) -> _Clocks:
        most_outputs = min(MOST_OUTPUTS, max(64, QUICK_FLOPS // (2 * min(rows, MOST_ROWS) * min(inputs, MOST_INPUTS)))) if quick else MOST_OUTPUTS
        sizes = min(rows, MOST_ROWS), min(outputs, most_outputs), min(inputs, MOST_INPUTS)
        larger = (rows / sizes[0]) * (outputs / sizes[1]) * (inputs / sizes[2])
        tokens, matrix = random(sizes[0], sizes[2]), random(*sizes[1:])
        if trains and quick:
            # Its backward pass takes twice as long (Kaplan et al., 2020), and would leave this rank the workspace of another thread.
            larger *= 3
            with torch.no_grad():
                took = best(lambda: kernels.linear(tokens, matrix, None), 3)
        elif trains:
            both, gradient = (tokens.requires_grad_(), matrix.requires_grad_()), random(sizes[0], sizes[1])
            with torch.enable_grad():
                took = best(lambda: torch.autograd.grad(kernels.linear(*both, None), both, gradient), 3)
        else:
            packed = kernels.pack(matrix)
            with torch.no_grad():
                took = best(lambda: kernels.linear_packed(tokens, packed, None), 3)
        return _Clocks(took.wall * larger, took.cpu * larger)

    def copying(copied: int) -> _Clocks:
        if device.type == "cpu":
            # Pages of their own, which are the system's again afterwards whatever the allocator keeps.
            source, target = (torch.frombuffer(mmap.mmap(-1, copied), dtype=torch.uint8) for _ in range(2))
            source.fill_(1)
        else:
            source = torch.ones(copied, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
        return best(lambda: target.copy_(source), 4)

    copied = QUICK_BYTES if quick else COPIED_BYTES
    copies = copying(copied)
    every = [one(int(rows), int(outputs), int(inputs), bool(trains)) for rows, outputs, inputs, trains in products]
    return Measured([each.wall for each in every], [each.cpu for each in every], 2 * copied / copies.wall, 2 * copied / max(copies.cpu, 1e-9))


def main() -> None:
    asked = json.load(sys.stdin)
    torch.set_num_threads(asked["threads"])
    device, dtype = torch.device(asked["device"]), getattr(torch, asked["dtype"])
    kernels = in_precision(select(asked["kernels"], dtype, device), asked["precision"], device)
    # From here on: the kernels may just have been compiled, for minutes.
    signal.setitimer(signal.ITIMER_REAL, asked["limit_s"])
    print(json.dumps(measure(kernels, asked["products"], dtype, device)._asdict()))


if __name__ == "__main__":
    with fast_exit():
        main()
