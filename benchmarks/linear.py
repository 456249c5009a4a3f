"""Fixed-order linear layers beside MKL (``torch.nn.functional.linear``), shape by shape.

The two take turns, so that both meet the same neighbours, and the best of the repetitions counts. "packed" is the engine's
path (the weight is laid out once), "training" lays it out in every call. Times are wall microseconds; "CPU" is the packed
kernel's CPU time over MKL's.

    python benchmarks/linear.py [--threads 1 2] [--seconds 0.3] [--out benchmarks/results]
"""

import datetime
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from options import parser as shared_parser

from tandem.kernels import select

SHAPES = [(4096, 1024), (1024, 4096), (1024, 4864), (512, 128), (128, 512), (256, 128), (99, 128)]
ROWS = [1, 4, 8, 16, 64, 256, 4096, 8192]
MOST_WORK = 4096 * 4096 * 1024
"""Multiply-adds; above this a shape says nothing that a smaller one has not said."""


class Best(NamedTuple):
    """The least seconds of a call."""

    wall: float
    cpu: float


def interleaved(calls: list[Callable[[], object]], seconds: float) -> list[Best]:
    """Each call in turn, again and again for ``seconds``, and at least three times."""
    for call in calls:
        call()
    best = [Best(float("inf"), float("inf"))] * len(calls)
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 3 or time.perf_counter() < end:
        for i, call in enumerate(calls):
            # A call of microseconds is measured several times at once: the clock of CPU time is coarse.
            repeat = max(1, min(100, int(2e-4 / best[i].wall))) if rounds else 1
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(repeat):
                call()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            best[i] = Best(min(best[i].wall, wall / repeat), min(best[i].cpu, cpu / repeat))
        rounds += 1
    return best


def table(threads: int, seconds: float) -> list[str]:
    """The rows of a Markdown table."""
    torch.set_num_threads(threads)
    kernels = select("cpu")
    lines = [
        "| N x K | rows | packed us | training us | MKL us | MKL / packed | MKL / training | CPU | GFLOP/s packed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for columns, width in SHAPES:
        weight = torch.randn(columns, width)
        packed = kernels.pack(weight)
        for rows in ROWS:
            if rows * columns * width > MOST_WORK:
                continue
            x = torch.randn(rows, width)
            ours, plain, mkl = interleaved(
                [
                    lambda x=x, packed=packed: kernels.linear_packed(x, packed, None),
                    lambda x=x, weight=weight: kernels.linear(x, weight, None),
                    lambda x=x, weight=weight: F.linear(x, weight),
                ],
                seconds,
            )
            lines.append(
                f"| {columns} x {width} | {rows} | {ours.wall * 1e6:.1f} | {plain.wall * 1e6:.1f} | {mkl.wall * 1e6:.1f} "
                f"| {mkl.wall / ours.wall:.2f} | {mkl.wall / plain.wall:.2f} | {ours.cpu / mkl.cpu:.2f} "
                f"| {2 * rows * columns * width / ours.wall / 1e9:.0f} |"
            )
            print(lines[-1], flush=True)
    return lines


def gradients(threads: int, seconds: float) -> list[str]:
    """Forward and backward of a layer in training."""
    torch.set_num_threads(threads)
    kernels = select("cpu")
    lines = ["| N x K | rows | ours us | MKL us | MKL / ours |", "| --- | --- | --- | --- | --- |"]
    for columns, width in SHAPES:
        for rows in (1024, 8192):
            if rows * columns * width > MOST_WORK:
                continue
            x, weight = torch.randn(rows, width, requires_grad=True), torch.randn(columns, width, requires_grad=True)
            grad = torch.randn(rows, columns)

            def step(linear: Callable[..., torch.Tensor], x=x, weight=weight, grad=grad) -> None:
                torch.autograd.grad(linear(x, weight, None), (x, weight), grad)

            ours, mkl = interleaved([lambda s=step: s(kernels.linear), lambda s=step: s(F.linear)], seconds)
            lines.append(
                f"| {columns} x {width} | {rows} | {ours.wall * 1e6:.0f} | {mkl.wall * 1e6:.0f} "
                f"| {mkl.wall / ours.wall:.2f} |"
            )
            print(lines[-1], flush=True)
    return lines


def machine() -> str:
    """The processor and the build of torch, in words."""
    info = Path("/proc/cpuinfo")
    fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line) if info.exists() else {}
    named = {key.strip(): value.strip() for key, value in fields.items()}
    known = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
    flags = [f for f in known if f in named.get("flags", "").split()]
    processor = named.get("model name", platform.processor())
    processor += f", family {named.get('cpu family', '?')} model {named.get('model', '?')}"
    load = f"load average {os.getloadavg()[0]:.1f} at the start"
    return f"{processor}; {os.cpu_count()} cores; {' '.join(flags)}; torch {torch.__version__}; {load}"


def main() -> None:
    parser = shared_parser(__doc__ or "", threads=(1, 2))
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each shape")
    options = parser.parse_args()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = ["# Linear layers: fixed order beside MKL", "", f"{today}. {machine()}.", "", __doc__.split("\n\n")[1], ""]
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"linear-{today}.md"
    for threads in options.threads:
        text += [f"## {threads} thread{'s' if threads > 1 else ''}", "", *table(threads, options.seconds), ""]
        text += ["Forward and both gradients, as one training step takes them:", "", *gradients(threads, options.seconds), ""]
        path.write_text("\n".join(text))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
