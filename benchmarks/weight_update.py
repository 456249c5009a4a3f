"""Verified bytes per second of the weight update, as a share of what the memory can do.

    python benchmarks/weight_update.py [--repeat 7] [--threads 2] [--owners 1]

Three models with the shapes of a Qwen3 (5 MB, 100 MB, 1 GB of fp32). In every round, one after the other, so that all see the
same machine: the ceiling (a plain copy between two warm private buffers, as many threads), ``register`` (copy to shared
memory, xxh3-128 of every tensor, publication) and ``update`` (copy out, xxh3-128 of the private copy of every tensor, all
compared with the manifest). The best of the rounds counts. With several ``--owners`` as many processes hold the weights, as data-parallel
ranks do, and each registers its share of the tensors with its share of the threads.
"""

import ctypes
import mmap
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from machine import machine, write_report
from options import parser as shared_parser

from tandem.kernels import select
from tandem.kernels.cpu.kernels import CpuKernels
from tandem.layout.parameters import parameters
from tandem.layout.shapes import ModelShapes
from tandem.layout.shard_offsets import whole_offsets
from tandem.runtime.collectives.communicator import Communicator, connect
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.trainer.checkpoint.replica_state import WeightShard
from tandem.trainer.parallel.ranks import alone
from tandem.types import WeightVersion
from tandem.weight_transfer.convert import place_shards
from tandem.weight_transfer.copying import address_of
from tandem.weight_transfer.manifest import segment_bytes
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import WeightBuffers, populate
from tandem.weight_transfer.update import WeightReader


def shapes(vocabulary: int, hidden: int, layers: int, inner: int, heads: int) -> ModelShapes:
    sizes = (vocabulary, hidden, layers, heads, heads // 2, hidden // heads, inner, 4096)
    return ModelShapes("qwen3", *sizes, tie_word_embeddings=True, qk_norm=True)


MODELS = {
    "5 MB": shapes(99, 128, 5, 512, 4),
    "100 MB": shapes(8000, 512, 7, 1536, 8),
    "500 MB": shapes(32000, 1024, 8, 2816, 16),
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


def shards_of(model: ModelShapes) -> list[WeightShard]:
    """The same random weights on every owner."""
    generator = torch.Generator().manual_seed(1)
    tensors = [(name, torch.randn(shape, generator=generator)) for name, shape in parameters(model)]
    return [WeightShard(name, tuple(t.shape), whole_offsets(tuple(t.shape)), t.dtype, lambda t=t: t) for name, t in tensors]


def train(shards: Sequence[WeightShard]) -> None:
    """Changes every weight: what has not changed is not written or read again."""
    for shard in shards:
        shard.read().add_(0.001)


def world_of(rank: int, owners: int, folder: Path) -> Communicator:
    """The owners' ranks, which meet in ``folder``."""
    if owners == 1:
        return alone().world
    return connect("world", rank, owners, dist.FileStore(str(folder / "rendezvous"), owners), torch.device("cpu"), 600.0)


def register_as(rank: int, owners: int, name: str, versions: int, threads: int, folder: Path, buffers: tuple[str, str]) -> None:
    """What an owner but the first does: its part of every version."""
    shards = shards_of(MODELS[name])
    placed = place_shards(world_of(rank, owners, folder), shards, [shard.name for shard in shards])
    writer = WeightWriter(WeightBuffers.open(buffers), EmbeddedStore(folder / "store.sqlite"), threads)
    for step in range(versions):
        train(shards)
        writer.publish(placed, WeightVersion(1, step))
    writer.close()


def measure(name: str, repeat: int, threads: int, owners: int, folder: Path) -> tuple[int, int, dict[str, Timed]]:
    """(tensors, bytes, rounds by name); the first, cold round of register and update is kept as ``cold ...``."""
    model, each = MODELS[name], max(1, threads // owners)
    shards = shards_of(model)
    size_bytes = sum(shard.read().nbytes for shard in shards)
    store = EmbeddedStore(folder / "store.sqlite")
    buffers = WeightBuffers.create("bench" + uuid.uuid4().hex[:8], segment_bytes(model, "float32"))
    arguments = [str(argument) for argument in (owners, name, repeat + 2, each, folder, *buffers.names)]
    others = [subprocess.Popen([sys.executable, __file__, "owner", str(rank), *arguments]) for rank in range(1, owners)]
    kernels = select("cpu")
    assert isinstance(kernels, CpuKernels)
    writer, reader = WeightWriter(buffers, store, each, kernels), WeightReader(store, threads)
    placed = place_shards(world_of(0, owners, folder), shards, [shard.name for shard in shards])
    copy = PlainCopy(size_bytes, threads)
    rounds = {name: Timed() for name in ("copy", "register", "update", "cold register", "cold update")}
    try:
        for step in range(repeat + 2):
            # The first use of each of the two buffers is cold.
            cold = "cold " if step < 2 else ""
            rounds["copy"].run(copy)
            version = WeightVersion(1, step)
            train(shards)
            rounds[cold + "register"].run(partial(writer.publish, placed, version))
            rounds[cold + "update"].run(partial(reader.read, version))
        received = reader.read().tensors
        assert all(torch.equal(sent.read(), got) for sent, (_, got) in zip(shards, received, strict=True))
        assert [other.wait(60) for other in others] == [0] * (owners - 1)
    finally:
        del copy
        for other in others:
            other.kill()
        reader.close()
        writer.close()
        store.close()
    return len(shards), size_bytes, rounds


def table(repeat: int, threads: int, owners: int) -> str:
    lines = [
        "| model | tensors | plain copy GB/s | register GB/s | share of copy | update GB/s | share of copy | both, ms (median) | "
        "CPU s a GB of the first owner, register / update | first use, ms: register / update |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in ("5 MB", "100 MB", "1 GB"):
        with tempfile.TemporaryDirectory() as folder:
            count, size, rounds = measure(name, repeat, threads, owners, Path(folder))
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
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["owner"]:
        rank, owners, name, versions, threads, folder, first, second = sys.argv[2:]
        register_as(int(rank), int(owners), name, int(versions), int(threads), Path(folder), (first, second))
        return
    parser = shared_parser(__doc__ or "", threads=2)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--owners", type=int, default=1, help="processes that hold the weights and register them together")
    options = parser.parse_args()
    described = machine()
    text = (
        f"# Weight update\n\n{described}\n\n"
        f"Best of {options.repeat} interleaved rounds, {options.threads} threads, {options.owners} owner(s), fp32. Every byte of "
        "register and update is digested with xxh3-128 and compared; the plain copy verifies nothing. The 5 MB model fits in the processor's cache, where a "
        "plain copy is much faster than from memory, and its fixed costs (the manifest and its publication, about 1 ms) show.\n\n"
        f"{table(options.repeat, options.threads, options.owners)}\n"
    )
    print(text)
    title = "weight-update" if options.owners == 1 else f"weight-update-{options.owners}-owners"
    print(f"wrote {write_report(title, text, options.out)}")


if __name__ == "__main__":
    main()
