"""An update of an engine that computes with the published weights where they are: register, verify, swap, beside a plain copy and a plain read.

    python benchmarks/weights_shared.py [--repeat 9] [--threads 2] [--models "5 MB,100 MB,500 MB,1 GB"]

In every round, one after the other, so that all see the same machine: a copy between two warm private buffers; a read of a warm private buffer (numpy, all
bits or-ed together); ``register`` (matrices written in the layout of the engine's kernels, xxh3-128 of every part, publication), ``verify`` (every part in
shared memory compared with its digest) and ``swap`` (a decoder takes the addresses of the version), each on ``--threads`` threads; and, for what it
replaces, ``register`` in rows, ``read`` (a verified private copy) and ``pack`` (of the copy, as the engine does). Ratios are of medians and of best rounds.
A second table has the swap alone, also of mixtures of experts and of each of two tensor-parallel ranks (``--swaps``: only that one).
"""

import mmap
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from machine import machine, write_ratios, write_report
from options import parser as shared_parser
from weight_update import MODELS, PlainCopy, shards_of, train

from tandem.kernels import select
from tandem.kernels.cpu.kernels import CpuKernels
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.shapes import ModelShapes
from tandem.layout.sharding import ShardSpec
from tandem.model.adopted import SharedTensors, adopt
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_parts
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.trainer.parallel.ranks import alone
from tandem.types import WeightVersion
from tandem.weight_transfer.convert import place_shards
from tandem.weight_transfer.copying import Threads
from tandem.weight_transfer.manifest import segment_bytes
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import OpenSegments, WeightBuffers, populate
from tandem.weight_transfer.shared_weights import SharedReader
from tandem.weight_transfer.sharing import packed_privately
from tandem.weight_transfer.update import WeightReader
from tandem.weight_transfer.wanted import wanted_by

SIDES = ("copy", "read", "register", "verify", "swap", "register in rows", "copied", "packed")


class PlainRead:
    """``threads`` threads read a warm private buffer."""

    def __init__(self, size_bytes: int, threads: int) -> None:
        buffer = mmap.mmap(-1, -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        populate(buffer)
        words = np.frombuffer(buffer, dtype=np.int64)
        self.parts, self.pool = np.array_split(words, threads), ThreadPoolExecutor(threads)

    def __call__(self) -> None:
        list(self.pool.map(np.bitwise_or.reduce, self.parts))


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(name: str, repeat: int, threads: int, folder: Path) -> tuple[int, int, dict[str, list[float]]]:
    """(tensors, bytes, seconds of each round by side)."""
    shapes, kernels = MODELS[name], select("cpu")
    assert isinstance(kernels, CpuKernels)
    shards = shards_of(shapes)
    size_bytes, names = sum(shard.read().nbytes for shard in shards), [shard.name for shard in shards]
    stores = {kind: EmbeddedStore(folder / f"{kind}.sqlite") for kind in ("panels", "rows")}
    buffers = {kind: WeightBuffers.create("bench" + uuid.uuid4().hex[:8], segment_bytes(shapes, "float32")) for kind in stores}
    for pair in buffers.values():
        for segment in pair.segments:
            if segment._collapsing is not None:
                segment._collapsing.join()
    writers = {kind: WeightWriter(WeightBuffers.open(buffers[kind].names), store, threads, kernels) for kind, store in stores.items()}
    placed = {kind: place_shards(alone().world, shards, names, engine_layout="panels" if kind == "panels" else None) for kind in stores}
    pool, segments, reader = Threads(threads), OpenSegments(), WeightReader(stores["rows"], threads)
    decoder, copying = (Decoder(shapes, kernels) for _ in range(2))
    torch.set_num_threads(threads)
    plain_copy, plain_read = PlainCopy(size_bytes, threads), PlainRead(size_bytes, threads)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for step in range(repeat + 2):
        version = WeightVersion(1, step)
        train(shards)
        found = {
            "copy": timed(plain_copy), "read": timed(plain_read),
            "register": timed(lambda version=version: writers["panels"].publish(placed["panels"], version)),
        }  # fmt: skip
        began = time.perf_counter()
        shared = SharedReader(stores["panels"], pool, segments).take(version, "panels", verifies=True)
        found["verify"] = time.perf_counter() - began
        assert shared is not None
        found["swap"] = timed(lambda shared=shared: adopt(decoder, SharedTensors(shared.tensors, shared.in_panels)))
        found["register in rows"] = timed(lambda version=version: writers["rows"].publish(placed["rows"], version))
        began = time.perf_counter()
        weights = reader.read(version)
        found["copied"] = time.perf_counter() - began
        found["packed"] = timed(lambda weights=weights: load_parts(copying, dict(weights.tensors), pack=True))
        if step > 1:  # The first use of each of two buffers is cold.
            for side, value in found.items():
                seconds[side].append(value)
    for theirs, ours in zip(copying.packed_matrices(), decoder.packed_matrices(), strict=True):
        for matrix, packed in theirs.items():
            assert packed is None or torch.equal(packed.data.view(-1), ours[matrix].data.view(-1)), matrix
    reader.close()
    segments.close()
    for kind in stores:
        writers[kind].close()
        buffers[kind].close()
        stores[kind].close()
    return len(shards), size_bytes, seconds


def with_experts(vocabulary: int, hidden: int, layers: int, experts: int, inner: int, heads: int) -> ModelShapes:
    sizes = (vocabulary, hidden, layers, heads, heads // 2, hidden // heads, inner, 4096)
    return ModelShapes("qwen3_moe", *sizes, tie_word_embeddings=True, qk_norm=True, experts=ExpertShapes(experts, 2, inner))


MIXTURES = {"5 MB of experts": with_experts(256, 128, 3, 8, 128, 2), "100 MB of experts": with_experts(8192, 512, 2, 16, 512, 8),
            "500 MB of experts": with_experts(8192, 512, 9, 16, 512, 8)}  # fmt: skip


class Alone:
    """In the place of a rank's group, for a shard that takes weights and computes nothing."""

    def __init__(self, shard_spec: ShardSpec) -> None:
        self.shard_spec = shard_spec

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    total = columns


def swaps(repeat: int, threads: int) -> str:
    """The table of the swap alone: of each rank the most of the medians."""
    lines = ["| model | bytes | tensors | ranks | swap, ms: median (most) | matrices that a rank packs itself |", "|" + " --- |" * 6]
    kernels = select("cpu")
    assert isinstance(kernels, CpuKernels)
    for name, shapes in {**{key: MODELS[key] for key in ("5 MB", "500 MB")}, **MIXTURES}.items():
        shards, pool = shards_of(shapes), Threads(threads)
        placed = place_shards(alone().world, shards, [shard.name for shard in shards], engine_layout="panels")
        with tempfile.TemporaryDirectory() as folder:
            store, buffers = EmbeddedStore(Path(folder) / "store.sqlite"), WeightBuffers.create("bench" + uuid.uuid4().hex[:8], placed.size_bytes)
            writer = WeightWriter(WeightBuffers.open(buffers.names), store, threads, kernels)
            for ranks in (1, 2):
                specs, segments = [ShardSpec(rank, ranks) for rank in range(ranks)], OpenSegments()
                decoders = [Decoder(shapes, kernels, group=cast("Any", Alone(spec)) if ranks > 1 else None) for spec in specs]
                seconds: list[list[float]] = [[] for _ in specs]
                for turn in range(repeat + 2):
                    step = WeightVersion(ranks, turn)
                    train(shards)
                    writer.publish(placed, step)
                    for spec, decoder, own in zip(specs, decoders, seconds, strict=True):
                        wanted = wanted_by(shapes, spec)
                        shared = SharedReader(store, pool, segments, wanted, (spec.rank, ranks)).take(step, "panels", verifies=True)
                        assert shared is not None
                        took = timed(lambda shared=shared, decoder=decoder: adopt(decoder, SharedTensors(shared.tensors, shared.in_panels)))
                        if turn > 1:  # The first use of each of two buffers is cold.
                            own.append(took)
                median = max(statistics.median(own) for own in seconds)
                lines.append(
                    f"| {name} | {placed.size_bytes:,} | {len(shards)} | {ranks} | {median * 1e3:.1f} ({max(map(max, seconds)) * 1e3:.1f}) | "
                    f"{len(packed_privately(shapes, ranks))} |"
                )
                print(lines[-1])
                segments.close()
            writer.close()
            buffers.close()
            store.close()
        pool.close()
    return "\n".join(lines)


def main() -> None:
    parser = shared_parser(__doc__ or "", threads=2, work="ratios are")
    parser.add_argument("--swaps", action="store_true", help="only the table of the swap, also with experts and two ranks")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args()
    described, rows = machine(), list[dict[str, object]]()
    if options.swaps:
        text = f"# Taking weights that engines share with the trainer\n\n{described}\n\n{swaps(options.repeat, options.threads)}\n"
        print(f"wrote {write_report('weights-swaps', text, options.out)}")
        return
    head = (
        "model", "tensors", "plain copy, GB/s", "plain read, GB/s", "register / copy", "verify / read", "register and verify / copy",
        "swap, ms: median (most)", "before: register in rows / copy", "before: register, copy and pack / copy",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            count, size, seconds = measure(name, options.repeat, options.threads, Path(folder))
        for title, of in (("medians", statistics.median), ("best rounds", min)):
            own = {side: of(values) for side, values in seconds.items()}
            ratio = {
                "register": own["copy"] / own["register"], "verify": own["read"] / own["verify"],
                "both": own["copy"] / (own["register"] + own["verify"] + own["swap"]), "rows": own["copy"] / own["register in rows"],
                "before": own["copy"] / (own["register in rows"] + own["copied"] + own["packed"]),
            }  # fmt: skip
            swap = f"{statistics.median(seconds['swap']) * 1e3:.1f} ({max(seconds['swap']) * 1e3:.1f})"
            lines.append(
                f"| {name}, {title} | {count} | {size / own['copy'] / 1e9:.1f} | {size / own['read'] / 1e9:.1f} | {ratio['register']:.0%} | "
                f"{ratio['verify']:.0%} | {ratio['both']:.0%} | {swap} | {ratio['rows']:.0%} | {ratio['before']:.0%} |"
            )
            print(lines[-1])
            if name == "500 MB":
                rows.append({"what": f"in the pod, shared: register, verify and swap / copy, {title}", "ratio": ratio["both"], "target": "at least 0.4"})
                rows.append({"what": f"in the pod, shared: verify / read, {title}", "ratio": ratio["verify"], "target": "at least 0.8"})
    text = (
        f"# Weights that engines share with the trainer\n\n{described}\n\n{options.repeat} rounds, {options.threads} threads, fp32. Parts are digested "
        "as they are written, and verified where they are. *Before* is the same in rows, with a verified private copy that the engine packs.\n\n"
        + "\n".join(lines) + f"\n\n{swaps(options.repeat, options.threads)}\n"
    )  # fmt: skip
    print(f"wrote {write_report('weights-shared', text, options.out)}")
    Path(options.work).mkdir(parents=True, exist_ok=True)
    write_ratios("weights_shared", rows, Path(options.work))


if __name__ == "__main__":
    main()
