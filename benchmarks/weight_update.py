"""Verified bytes per second of the weight update, as a share of what the memory can do.

    python benchmarks/weight_update.py [--repeat 7] [--threads 2]

Three models with the shapes of a Qwen3 (5 MB, 100 MB, 1 GB of fp32). In every round, one after the other, so that all see the
same machine: the ceiling (a plain copy between two warm private buffers, as many threads), ``register`` (copy to shared
memory, xxh3-128 of every tensor, publication) and ``update`` (copy out, xxh3-128 of the private copy of every tensor, all
compared with the manifest). The best of the rounds counts.
"""

import ctypes
import mmap
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from machine import machine, write_report
from options import parser as shared_parser

from tandem.checkpoint_engine.copying import address_of
from tandem.checkpoint_engine.manifest import segment_bytes
from tandem.checkpoint_engine.register import WeightWriter
from tandem.checkpoint_engine.shared_memory import WeightBuffers, populate
from tandem.checkpoint_engine.update import WeightReader
from tandem.layout.shapes import ModelShapes, parameters
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.types import WeightVersion


def shapes(vocabulary: int, hidden: int, layers: int, inner: int, heads: int) -> ModelShapes:
    sizes = (vocabulary, hidden, layers, heads, heads // 2, hidden // heads, inner, 4096)
    return ModelShapes("qwen3", *sizes, tie_word_embeddings=True, qk_norm=True)


MODELS = {
    "5 MB": shapes(99, 128, 5, 512, 4),
    "100 MB": shapes(8000, 512, 7, 1536, 8),
    "1 GB": shapes(65536, 1024, 15, 3072, 16),
}


@dataclass
class Timed:
    """Wall and CPU seconds of each round."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def run(self, work: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.process_time() - cpu)


class PlainCopy:
    """The ceiling: ``threads`` threads copy one warm private buffer to another with the C library's memmove."""

    def __init__(self, size_bytes: int, threads: int) -> None:
        self.buffers = [mmap.mmap(-1, size_bytes) for _ in range(2)]
        for buffer in self.buffers:
            populate(buffer)
        self.addresses = [address_of(memoryview(buffer)) for buffer in self.buffers]
        self.bounds = [size_bytes * i // threads for i in range(threads + 1)]
        self.pool = ThreadPoolExecutor(threads)

    def __call__(self) -> None:
        def copy(i: int) -> None:
            at, end = self.bounds[i], self.bounds[i + 1]
            ctypes.memmove(self.addresses[1] + at, self.addresses[0] + at, end - at)

        list(self.pool.map(copy, range(len(self.bounds) - 1)))


def measure(model: ModelShapes, repeat: int, threads: int, folder: Path) -> tuple[int, int, dict[str, Timed]]:
    """(tensors, bytes, rounds by name); the first, cold round of register and update is kept as ``cold ...``."""
    tensors = [(name, torch.randn(shape)) for name, shape in parameters(model)]
    size_bytes = sum(tensor.numel() * 4 for _, tensor in tensors)
    store = EmbeddedStore(folder / f"{uuid.uuid4().hex}.sqlite")
    buffers = WeightBuffers.create("bench" + uuid.uuid4().hex[:8], segment_bytes(model, "float32"))
    writer, reader = WeightWriter(buffers, store, threads), WeightReader(store, threads)
    copy = PlainCopy(size_bytes, threads)
    rounds = {name: Timed() for name in ("copy", "register", "update", "cold register", "cold update")}
    try:
        for step in range(repeat + 2):
            # The first use of each of the two buffers is cold.
            cold = "cold " if step < 2 else ""
            rounds["copy"].run(copy)
            version = WeightVersion(1, step)
            rounds[cold + "register"].run(partial(writer.publish, tensors, version))
            rounds[cold + "update"].run(partial(reader.read, version))
        received = reader.read().tensors
        assert all(torch.equal(sent, got) for (_, sent), (_, got) in zip(tensors, received, strict=True))
    finally:
        del copy
        reader.close()
        writer.close()
        store.close()
    return len(tensors), size_bytes, rounds


def table(repeat: int, threads: int) -> str:
    lines = [
        "| model | tensors | plain copy GB/s | register GB/s | share of copy | update GB/s | share of copy | both, ms (median) | "
        "CPU s a GB, register / update | first use, ms: register / update |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name, model in MODELS.items():
            count, size, rounds = measure(model, repeat, threads, Path(folder))
            rate = {key: size / min(timed.wall_s) / 1e9 for key, timed in rounds.items()}
            cpu = {key: min(timed.cpu_s) / size * 1e9 for key, timed in rounds.items()}
            both = statistics.median(a + b for a, b in zip(rounds["register"].wall_s, rounds["update"].wall_s, strict=True))
            cold = [max(rounds["cold " + key].wall_s) * 1e3 for key in ("register", "update")]
            lines.append(
                f"| {name} | {count} | {rate['copy']:.1f} | {rate['register']:.1f} | {rate['register'] / rate['copy']:.0%} | "
                f"{rate['update']:.1f} | {rate['update'] / rate['copy']:.0%} | {both * 1e3:.1f} | "
                f"{cpu['register']:.2f} / {cpu['update']:.2f} | {cold[0]:.0f} / {cold[1]:.0f} |"
            )
            print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


def main() -> None:
    parser = shared_parser(__doc__ or "", threads=2)
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    described = machine()
    text = (
        f"# Weight update\n\n{described}\n\n"
        f"Best of {options.repeat} interleaved rounds, {options.threads} threads, fp32. Every byte of register and update is digested "
        "with xxh3-128 and compared; the plain copy verifies nothing. The 5 MB model fits in the processor's cache, where a "
        "plain copy is much faster than from memory, and its fixed costs (the manifest and its publication, about 1 ms) show.\n\n"
        f"{table(options.repeat, options.threads)}\n"
    )
    print(text)
    print(f"wrote {write_report('weight-update', text, options.out)}")


if __name__ == "__main__":
    main()
