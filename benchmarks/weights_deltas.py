"""Updates in which 2 % of the bytes have changed, beside those in which all have: in the pod, and between two pods over TCP loopback."""

import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
from weight_update import MODELS, shards_of

from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.trainer.checkpoint.replica_state import WeightShard
from tandem.trainer.parallel.ranks import alone
from tandem.types import WeightVersion
from tandem.weight_transfer.convert import ConvertedWeights, place_shards
from tandem.weight_transfer.manifest import segment_bytes
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import WeightBuffers
from tandem.weight_transfer.update import WeightReader

SHARE = 0.02
TITLES = {"full": "all changed", "declared": "2 % changed, the rest declared frozen", "compared": "2 % changed, found by comparison"}


class Model:
    """The weights of a trainer. ``kinds``: all of them, or those of which a part is frozen, in the form that a writer takes."""

    def __init__(self, name: str) -> None:
        shards = shards_of(MODELS[name])
        self.tensors = [shard.read() for shard in shards]
        whole, taken, self.few = sum(tensor.nbytes for tensor in self.tensors), 0, list[int]()
        for i in sorted(range(len(shards)), key=lambda i: -self.tensors[i].nbytes):
            if taken + self.tensors[i].nbytes <= SHARE * whole:
                taken += self.tensors[i].nbytes
                self.few.append(i)
        self.share = taken / whole
        frozen = [shard if i in self.few else shard._replace(is_frozen=True) for i, shard in enumerate(shards)]
        self.kinds = {"full": self._placed(shards), "declared": self._placed(frozen), "compared": self._placed(shards)}

    def _placed(self, shards: list[WeightShard]) -> ConvertedWeights:
        return place_shards(alone().world, shards, [shard.name for shard in shards])

    def train(self, kind: str) -> ConvertedWeights:
        """Changes what a version of this ``kind`` changes."""
        for i, tensor in enumerate(self.tensors):
            if kind == "full" or i in self.few:
                tensor.add_(0.001)
        return self.kinds[kind]


def rounds(kinds: tuple[str, ...], repeat: int) -> list[tuple[str, bool]]:
    """The kind of each version and whether it is timed. Two of a kind follow each other before, because two buffers take turns."""
    return [(kind, is_timed) for _ in range(repeat) for kind in kinds for is_timed in (False, False, True)]


def in_pod(name: str, repeat: int, threads: int) -> tuple[dict[str, list[float]], float]:
    """Seconds to register and to read each kind of version, and the share of the bytes that changed."""
    model, seconds = Model(name), {kind: list[float]() for kind in TITLES}
    with tempfile.TemporaryDirectory() as folder:
        store = EmbeddedStore(Path(folder) / "store.sqlite")
        buffers = WeightBuffers.create("bench" + uuid.uuid4().hex[:8], segment_bytes(MODELS[name], "float32"))
        writer, reader = WeightWriter(buffers, store, threads), WeightReader(store, threads)
        try:
            for step, (kind, is_timed) in enumerate(rounds(tuple(TITLES), repeat)):
                placed = model.train(kind)
                began = time.perf_counter()
                writer.publish(placed, WeightVersion(1, step))
                tensors = reader.read().tensors
                if is_timed:
                    seconds[kind].append(time.perf_counter() - began)
            assert all(torch.equal(mine, own) for (_, mine), own in zip(tensors, model.tensors, strict=True))
        finally:
            reader.close()
            writer.close()
            store.close()
    return seconds, model.share


def table(inside: dict[str, list[float]], between: dict[str, list[float]], share: float) -> str:
    lines = ["| update | in the pod, ms | share of the full one | between two pods, ms | share of the full one |", "| --- | --- | --- | --- | --- |"]
    full = statistics.median(inside["full"]), statistics.median(between["full"])
    for kind, title in TITLES.items():
        row = f"| {title} | {statistics.median(inside[kind]) * 1e3:.1f} | {statistics.median(inside[kind]) / full[0]:.1%} |"
        # Another pod does not know how the trainer found what has changed.
        seconds = between.get(kind)
        lines.append(row + (f" {statistics.median(seconds) * 1e3:.1f} | {statistics.median(seconds) / full[1]:.1%} |" if seconds else " | |"))
    return "\n".join(lines) + f"\n\nMedians; {share:.1%} of the bytes. In the pod: register and read, verified. Between pods: until the second pod has it."


def deltas(name: str, repeat: int, threads: int, publish_and_bring: Callable[[str], float]) -> str:
    """The table. ``publish_and_bring``: publishes a version of a kind in another process, and returns the seconds until it is here."""
    between = {kind: list[float]() for kind in ("full", "declared")}
    for kind, is_timed in rounds(tuple(between), repeat):
        seconds = publish_and_bring(kind)
        if is_timed:
            between[kind].append(seconds)
    inside, share = in_pod(name, repeat, threads)
    print(inside, between, file=sys.stderr)
    return table(inside, between, share)
