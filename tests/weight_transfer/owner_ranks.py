"""Functions that trainer ranks run in the tests of weights with several owners."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from model_ranks import LEARNING_RATE, Case, ranks_of, sequences_of, weights_of
from ranks import RankContext
from torch import Tensor

from tandem.kernels import select
from tandem.layout.pipeline_stages import stage_spans
from tandem.layout.schedules import PipelineShape
from tandem.layout.shard_offsets import ShardOffsets
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_tensors, save_model
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.trainer.checkpoint.replica_state import ReplicaState, WeightShard
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.cross_entropy import make_cross_entropy_loss
from tandem.trainer.micro_batch import collate
from tandem.trainer.parallel.pipeline import Pipeline
from tandem.trainer.parallel.replica import Replica, make_replica
from tandem.trainer.step import train_step
from tandem.types import RunError, WeightVersion
from tandem.weight_transfer import register
from tandem.weight_transfer.convert import convert, place_shards
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import WeightBuffers

WHOLE_ROWS, COLUMNS = 64, 500


def replica_of(here: RankContext | None, case: Case, zero: Any = 0, virtual: int = 1, folder: Path | None = None, offloaded: Sequence[str] = ()) -> Replica:
    """Returns the model of ``case`` on this rank, or in one process if ``here`` is ``None``. ``offloaded``: keys of section ``trainer`` to set to ``nvme``."""
    torch.set_num_threads(1)
    ranks, dtype = ranks_of(here, case), getattr(torch, case.dtype)
    stages = ranks.groups["pipeline"]
    spans = stage_spans(case.shapes, stages.size * virtual)
    own = [spans[s] for s in PipelineShape(stages.size, 1, virtual).stages_of(stages.rank)]
    model = Decoder(case.shapes, select(case.kernels, dtype), dtype=dtype, parallel=ranks.model_parallel(), spans=own)
    load_tensors(model, weights_of(case.shapes).items())
    pipeline = Pipeline(model, spans, stages, "1f1b" if virtual == 1 else "interleaved") if stages.size > 1 else None
    return make_replica(model, replace(case.trainer, **dict.fromkeys(offloaded, "nvme")), ranks, zero, pipeline, directory=folder)


def registered(here: RankContext | None, names: tuple[str, str], store: Path, case: Case, zero: Any = 0, virtual: int = 1,
               folder: Path | None = None, offloaded: Sequence[str] = (), model_folder: Path | None = None) -> tuple[int, str]:  # fmt: skip
    """Registers the weights as step 1; returns (bytes that this rank wrote, the manifest's digest). ``model_folder``: data-parallel ranks
    first train for one step, and the first rank writes the resulting model there."""
    replica = replica_of(here, case, zero, virtual, folder, offloaded)
    if model_folder is not None:
        train_once(replica, case, model_folder)
    converted = convert(ReplicaState(replica))
    writer = WeightWriter(WeightBuffers.open(names), EmbeddedStore(store))
    manifest = writer.publish(converted, WeightVersion(1, 1))
    writer.close()
    return sum(part.size_bytes for part in converted.own), manifest.digest


def train_once(replica: Replica, case: Case, folder: Path) -> None:
    data, every = replica.ranks.groups["data"], sequences_of(case)
    micro_batch = collate(every[data.rank :: data.size], getattr(torch, case.dtype))
    train_step(replica.model, replica.optimizer, [micro_batch], make_cross_entropy_loss(counts_of(every)), LEARNING_RATE, sums=replica.sums)
    with replica.whole():
        if replica.ranks.is_first:
            save_model(replica.model, folder)


def rows(here: RankContext, read: Callable[[int, ShardOffsets], Tensor], tensors: int = 6) -> list[WeightShard]:
    """Returns this rank's rows of synthetic tensors; ``read(tensor, box)`` returns their values."""
    world, found = here.groups["world"], []
    share = WHOLE_ROWS // world.size
    for i in range(tensors):
        whole = (WHOLE_ROWS, COLUMNS + i)
        box = ShardOffsets((world.rank * share, 0), ((world.rank + 1) * share, whole[1]))
        found.append(WeightShard(f"t{i}", whole, box, torch.float32, lambda i=i, box=box: read(i, box)))
    return found


def bytes_of_deltas(here: RankContext, names: tuple[str, str], store: Path) -> list[int]:
    """Registers four versions, of which the last two have another first tensor on rank 0 alone; returns the bytes that this rank copied for each."""
    torch.set_num_threads(1)
    writer, copied, own = WeightWriter(WeightBuffers.open(names), EmbeddedStore(store), threads=1), list[int](), register.copy_and_digest

    def counted(destination: int, source: int, size_bytes: int, *, of_source: bool) -> str:
        copied[-1] += size_bytes
        return own(destination, source, size_bytes, of_source=of_source)

    register.copy_and_digest = counted
    rank = here.groups["world"].rank
    for step in range(4):
        copied.append(0)
        shards = rows(here, lambda i, box, step=step: torch.full(box.shape, i + (float(step) if i == rank == 0 else 0.0)))
        writer.publish(place_shards(here.groups["world"], shards), WeightVersion(1, step))
    register.copy_and_digest = own
    return copied


def many_versions(here: RankContext, names: tuple[str, str], store: Path, count: int) -> None:
    """Registers ``count`` versions as fast as the ranks can; every tensor of step n is filled with n."""
    torch.set_num_threads(1)
    writer = WeightWriter(WeightBuffers.open(names), EmbeddedStore(store), threads=1)
    for step in range(1, count + 1):
        shards = rows(here, lambda i, box, step=step: torch.full(box.shape, float(step)))
        writer.publish(place_shards(here.groups["world"], shards), WeightVersion(1, step))


def announced_versions(here: RankContext, names: tuple[str, str], store: Path, goes_on: Path) -> None:
    """Announces and registers a version whose tensor ``ti`` is filled with i; the last one is written when ``goes_on`` exists."""
    torch.set_num_threads(1)
    writer = WeightWriter(WeightBuffers.open(names), EmbeddedStore(store), threads=1)

    def read(i: int, box: ShardOffsets) -> Tensor:
        ends = time.monotonic() + 30
        while i == 5 and not goes_on.exists():
            assert time.monotonic() < ends, "nobody has read the others"
            time.sleep(0.005)
        return torch.full(box.shape, float(i))

    writer.publish(place_shards(here.groups["world"], rows(here, read)), WeightVersion(1, 1), announces=True)
    writer.close()


def one_fails(here: RankContext, names: tuple[str, str], store: Path, told: Path, how: str) -> str:
    """Registers step 1, and step 2, during which rank 1 fails to read its fourth tensor (``how`` is ``raise``) or is killed. Returns the
    error that this rank raises, and writes it to ``told``."""
    writer = WeightWriter(WeightBuffers.open(names), EmbeddedStore(store), threads=1)
    world = here.groups["world"]
    writer.publish(place_shards(world, rows(here, lambda i, box: torch.full(box.shape, 1.0))), WeightVersion(1, 1))

    def read(i: int, box: ShardOffsets) -> Tensor:
        if world.rank == 1 and i == 3:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(5, "Input/output error")
        return torch.full(box.shape, 2.0)

    try:
        writer.publish(place_shards(world, rows(here, read)), WeightVersion(1, 2))
    except RunError as error:
        (told / str(world.rank)).write_text(str(error))
        return str(error)
    return "registered"


def peak(here: RankContext, names: tuple[str, str], store: Path, case: Case, zero: Any) -> tuple[int, int, int]:
    """Returns (bytes that this rank wrote, peak growth of its resident memory while it converted and registered, private bytes of these)."""
    replica = replica_of(here, case, zero)
    state, writer = ReplicaState(replica), WeightWriter(WeightBuffers.open(names), EmbeddedStore(store))
    before = _memory()
    Path("/proc/self/clear_refs").write_text("5")
    converted = convert(state)
    writer.publish(converted, WeightVersion(1, 1))
    after = _memory()
    own = sum(part.size_bytes for part in converted.own)
    writer.close()
    return own, after["VmHWM"] - before["VmRSS"], after["VmHWM"] - before["VmRSS"] - (after["RssShmem"] - before["RssShmem"])


def _memory() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words[0] in ("VmHWM:", "VmRSS:", "RssShmem:")}
