"""Processes for the tests of the weight transfer: ``python helpers_weights.py WHAT ARGUMENTS``."""

import sys
import time
from pathlib import Path

from tandem.weight_transfer.shared_memory import Segment, WeightBuffers


def own(pod_id: str, size_bytes: str) -> None:
    """Acts as a shim: owns two small buffers until it is killed."""
    buffers = WeightBuffers.create(pod_id, int(size_bytes))
    print(*buffers.names, flush=True)
    time.sleep(60)


def write_versions(store_path: str, first: str, second: str, count: str) -> None:
    """Acts as a trainer's worker: publishes ``count`` versions as fast as it can; every tensor of step n is filled with n."""
    import torch
    from whole_tensors import converted

    from tandem.runtime.coordination.embedded import EmbeddedStore
    from tandem.types import WeightVersion
    from tandem.weight_transfer.register import WeightWriter

    torch.set_num_threads(1)
    writer = WeightWriter(WeightBuffers.open((first, second)), EmbeddedStore(Path(store_path)), threads=1)
    for step in range(1, int(count) + 1):
        tensors = [(f"t{i}", torch.full((64, 1000 + i), float(step))) for i in range(8)]
        writer.publish(converted(tensors), WeightVersion(1, step))
    print("done", flush=True)


def announce_and_wait(store_path: str, first: str, second: str) -> None:
    """Acts as a trainer's worker: announces step 2 and writes two of its tensors; then it waits to be killed."""
    import torch

    from tandem.layout.shard_offsets import whole_offsets
    from tandem.runtime.coordination.embedded import EmbeddedStore
    from tandem.trainer.checkpoint.replica_state import WeightShard
    from tandem.trainer.parallel.ranks import alone
    from tandem.types import WeightVersion
    from tandem.weight_transfer.convert import place_shards
    from tandem.weight_transfer.register import WeightWriter

    def read(number: int) -> torch.Tensor:
        if number == 2:
            print("waits", flush=True)
            time.sleep(60)
        return torch.full((100, 300), float(number))

    shards = [WeightShard(f"t{i}", (100, 300), whole_offsets((100, 300)), torch.float32, lambda i=i: read(i)) for i in range(6)]
    writer = WeightWriter(WeightBuffers.open((first, second)), EmbeddedStore(Path(store_path)), threads=1)
    writer.publish(place_shards(alone().world, shards), WeightVersion(1, 2), announces=True)


def race(store_path: str, incarnation: str, steps: str) -> None:
    """Publishes its steps one by one; prints the accepted ones."""
    from tandem.runtime.coordination.embedded import EmbeddedStore
    from tandem.types import RunError, WeightVersion
    from tandem.weight_transfer.manifest import make_manifest
    from tandem.weight_transfer.publication import publish

    store = EmbeddedStore(Path(store_path))
    accepted = []
    for step in range(int(steps)):
        try:
            publish(store, make_manifest(WeightVersion(int(incarnation), step), []))
            accepted.append(step)
        except RunError:
            pass
    print(*accepted, flush=True)


def scribble(name: str) -> None:
    """Acts as a reader that writes to a segment opened for reading."""
    segment = Segment.open(name)
    segment.memory[0] = 99
    print(segment.memory[0], flush=True)


if __name__ == "__main__":
    {"own": own, "write_versions": write_versions, "announce_and_wait": announce_and_wait, "race": race, "scribble": scribble}[sys.argv[1]](*sys.argv[2:])
