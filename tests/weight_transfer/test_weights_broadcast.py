"""Several engines of a host take the weights out of the shared memory itself, and all of it is verified once, after that."""

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from whole_tensors import converted

from tandem.layout.shard_offsets import ShardOffsets
from tandem.pod.rollout_workers import RolloutWorkers
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.rpc.calls import Meta
from tandem.trainer.checkpoint.replica_state import WeightShard
from tandem.trainer.parallel.ranks import alone
from tandem.types import DamagedWeights, RunError, WeightVersion
from tandem.types.wire import Frame
from tandem.weight_transfer.convert import place_shards
from tandem.weight_transfer.publication import current
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import WeightBuffers
from tandem.weight_transfer.update import WeightReader
from tandem.weight_transfer.verify import PublishedVerifier

FIRST, SECOND = WeightVersion(1, 1), WeightVersion(1, 2)


def weights(seed: int) -> list[tuple[str, Tensor]]:
    drawn = torch.Generator().manual_seed(seed)
    return [("embed", torch.randn(700, 300, generator=drawn)), ("half", torch.randn(33, 5, generator=drawn).bfloat16()), ("empty", torch.empty(0, 4))]


class Host:
    def __init__(self, folder: Path) -> None:
        self.buffers, self.store = WeightBuffers.create("test" + uuid.uuid4().hex[:8], 1 << 20), EmbeddedStore(folder / "store.sqlite")
        self.writer = WeightWriter(WeightBuffers.open(self.buffers.names), self.store, 1)
        self.reader, self.verifier = WeightReader(self.store), PublishedVerifier(self.store)

    def publish(self, step: int) -> None:
        self.writer.publish(converted(weights(step)), WeightVersion(1, step))

    def revision(self) -> int:
        published = current(self.store)
        assert published is not None
        return published[1]

    def flip(self, name: str, at: int) -> None:
        published = current(self.store)
        assert published is not None
        entry = next(entry for entry in published[0].tensors if entry.name == name)
        next(each for each in self.buffers.segments if each.name == entry.segment).memory[entry.offset_bytes + at] ^= 16


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    torch.set_num_threads(1)
    made = Host(tmp_path)
    yield made
    for each in (made.reader, made.verifier, made.writer, made.buffers, made.store):
        each.close()


def test_a_view_is_the_shared_memory_and_verification_reads_all_of_it(host: Host) -> None:
    host.publish(1)
    view = host.reader.view(FIRST)
    assert [name for name, _ in view.tensors] == ["embed", "half", "empty"] and view.revision == host.revision()
    assert all(torch.equal(tensor, sent) for (_, tensor), (_, sent) in zip(view.tensors, weights(1), strict=True))
    host.buffers.segments[0].memory[0] ^= 1
    assert not torch.equal(view.tensors[0][1], weights(1)[0][1]), "it was a copy"
    host.buffers.segments[0].memory[0] ^= 1
    assert host.verifier.verify(FIRST, [view.revision]) == sum(tensor.nbytes for _, tensor in weights(1))


@pytest.mark.parametrize(("name", "at"), [("embed", 0), ("embed", 4 * 700 * 300 - 1), ("half", 100)])
def test_one_flipped_bit_is_named(host: Host, name: str, at: int) -> None:
    host.publish(1)
    host.flip(name, at)
    with pytest.raises(DamagedWeights, match=rf"tensor '{name}' of weights of step 1 \(incarnation 1\) does not have its digest [0-9a-f]{{32}}"):
        host.verifier.verify(FIRST, [host.revision()])
    host.flip(name, at)
    host.verifier.verify(FIRST, [host.revision()])


def test_what_was_published_again_since_an_engine_took_it_is_not_confirmed(host: Host) -> None:
    host.publish(1)
    taken = host.reader.view(FIRST).revision
    host.publish(1)
    for version, revisions in ((FIRST, [taken]), (FIRST, [taken, host.revision()]), (SECOND, [host.revision()])):
        with pytest.raises(RunError, match="were published again or replaced while engines took them; update the engines again"):
            host.verifier.verify(version, revisions)
    published = current(host.store)
    assert published is not None
    next(each for each in host.buffers.segments if each.name == published[0].tensors[0].segment).contents = None
    with pytest.raises(RunError, match="published again or replaced"):
        host.verifier.verify(FIRST, [host.revision()])


def test_a_publication_during_the_verification_is_seen_after_it(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.publish(1)
    taken, own = host.revision(), host.verifier._threads.map

    def overtaken(function: Any, items: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        right = own(function, items, sizes)
        host.publish(2)
        return right

    monkeypatch.setattr(host.verifier._threads, "map", overtaken)
    with pytest.raises(RunError, match="published again or replaced"):
        host.verifier.verify(FIRST, [taken])


@pytest.mark.parametrize("axis", [0, 1])
def test_a_view_has_the_slices_of_a_rank_whoever_wrote_the_parts(host: Host, axis: int) -> None:
    whole = weights(3)[0][1]
    halves = [ShardOffsets((0, 0), (350, 300) if axis == 0 else (700, 100)), ShardOffsets((350, 0) if axis == 0 else (0, 100), (700, 300))]
    shards = [WeightShard("embed", (700, 300), part, whole.dtype, lambda part=part: whole[part.slices]) for part in halves]
    host.writer.publish(place_shards(alone().world, shards), FIRST)
    wanted = ShardOffsets((10, 40), (500, 260))
    reader = WeightReader(host.store, wanted=lambda name, shape: wanted)
    view = reader.view(FIRST)
    assert torch.equal(view.tensors[0][1], whole[10:500, 40:260])
    assert host.verifier.verify(FIRST, [view.revision]) == whole.nbytes
    reader.close()


class Worker:
    """Notes what it is asked in ``calls``, of all workers."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def call(self, name: str, meta: Meta | None = None, *_: Any, **__: Any) -> Frame:
        assert meta is not None
        self.calls.append(name)
        version = [-1, -1] if meta.get("unverified") else meta["version"]
        return Frame({"version": version, "rereads": [], "kv_cache_bytes": 0, "base_bytes": 0, "seconds": 0.0, "revision": 7}, {})


@pytest.mark.parametrize("is_damaged", [False, True])
def test_no_worker_is_told_that_its_weights_are_verified_before_they_are(is_damaged: bool) -> None:
    calls = list[str]()

    def verify(version: Sequence[int], revisions: Sequence[int | None]) -> None:
        calls.append(f"verify {list(version)} {list(revisions)}")
        if is_damaged:
            raise DamagedWeights("damaged")

    workers = RolloutWorkers([Worker(calls) for _ in range(3)], lambda _: Worker(calls), 1, 1.0, verify=verify)
    if is_damaged:
        with pytest.raises(DamagedWeights):
            workers.update_weight({"version": [1, 4]}, {}, lambda _: None)
    else:
        workers.update_weight({"version": [1, 4]}, {}, lambda _: None)
    assert calls == ["update_weight"] * 3 + ["verify [1, 4] [7, 7, 7]"] + ["confirm_weight"] * (0 if is_damaged else 3)
