"""What a reader, a writer or another pod holds already, by its digest, is not written, read or sent again; and is when it is damaged."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from two_pods import TwoPods

from tandem.layout.shard_offsets import ShardOffsets, whole_offsets
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.trainer.checkpoint.replica_state import WeightShard
from tandem.trainer.parallel.ranks import alone
from tandem.types import DamagedWeights, WeightVersion
from tandem.weight_transfer import register
from tandem.weight_transfer.convert import ConvertedWeights, place_shards
from tandem.weight_transfer.publication import current
from tandem.weight_transfer.shared_memory import Segment
from tandem.weight_transfer.update import WeightReader

NAMES, SHAPE = [f"t{i}" for i in range(8)], (50, 400)
SIZE = 50 * 400 * 4


def version(step: int) -> WeightVersion:
    return WeightVersion(1, step)


def tensors(*seeds: int) -> list[tuple[str, Tensor]]:
    """Returns a tensor for each of the ``seeds``, which says what is in it."""
    return [(name, torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))) for name, seed in zip(NAMES, seeds, strict=False)]


def are_equal(one: Sequence[tuple[str, Tensor]], other: Sequence[tuple[str, Tensor]]) -> bool:
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(one, other, strict=True))


def flip(segments: Sequence[Segment], folder_store: EmbeddedStore, name: str, at: int = 1000) -> None:
    """Flips a bit of the published tensor ``name``."""
    published = current(folder_store)
    assert published is not None
    entry = next(entry for entry in published[0].tensors if entry.name == name)
    next(each for each in segments if each.name == entry.segment).memory[entry.offset_bytes + at] ^= 4


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[TwoPods]:
    torch.set_num_threads(1)
    made = TwoPods(tmp_path)
    yield made
    made.close()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every part that a writer copies from now on."""
    sizes, own = list[int](), register.copy_and_digest

    def counted(destination: int, source: int, size_bytes: int, *, of_source: bool) -> str:
        sizes.append(size_bytes)
        return own(destination, source, size_bytes, of_source=of_source)

    monkeypatch.setattr(register, "copy_and_digest", counted)
    return sizes


def read_alone(store: EmbeddedStore) -> list[tuple[str, Tensor]]:
    """Returns what a reader without a past reads."""
    reader = WeightReader(store)
    try:
        return [(name, tensor.clone()) for name, tensor in reader.read().tensors]
    finally:
        reader.close()


def test_the_writer_copies_what_has_changed_since_the_version_that_the_buffer_holds(pods: TwoPods, copied: list[int]) -> None:
    # The two buffers take turns, so a tensor that changes once is copied twice.
    for step, (seeds, count) in enumerate([((1, 2, 3, 4), 4), ((1, 2, 3, 4), 4), ((1, 9, 3, 4), 1), ((1, 9, 3, 4), 1), ((1, 9, 3, 4), 0), ((5, 9, 3, 6), 2)]):
        copied.clear()
        pods.publish(tensors(*seeds), version(step))
        assert copied == [SIZE] * count, step
        assert are_equal(read_alone(pods.shared), tensors(*seeds))


@pytest.mark.parametrize("at", [(0, 0), (20, 17), (49, 399)])
def test_a_single_element_that_has_changed_is_found_wherever_it_is(pods: TwoPods, at: tuple[int, int]) -> None:
    for step in range(3):
        sent = tensors(1, 2)
        sent[1][1][at] += float(step)
        pods.publish(sent, version(step))
        assert are_equal(read_alone(pods.shared), sent)


def frozen(values: Sequence[tuple[str, Tensor]], names: Sequence[str], read: Callable[[str], object]) -> ConvertedWeights:
    def reading(name: str, tensor: Tensor) -> Callable[[], Tensor]:
        def value() -> Tensor:
            read(name)
            return tensor

        return value

    shards = [WeightShard(name, SHAPE, whole_offsets(SHAPE), t.dtype, reading(name, t), name in names) for name, t in values]
    return place_shards(alone().world, shards)


def test_frozen_tensors_are_read_for_the_first_version_in_each_buffer_only(pods: TwoPods) -> None:
    read = list[str]()
    for step, expected in enumerate([["t0", "t1", "t2"], ["t0", "t1", "t2"], ["t1"], ["t1"]]):
        read.clear()
        pods.writer.publish(frozen(tensors(1, step, 3), ["t0", "t2"], read.append), version(step))
        assert sorted(read) == expected
        assert are_equal(read_alone(pods.shared), tensors(1, step, 3))


def test_a_tensor_that_was_frozen_after_it_had_changed_is_published_as_it_is(pods: TwoPods) -> None:
    for step in range(5):
        values = tensors(min(step, 2), 2)
        pods.writer.publish(frozen(values, ["t0"] if step > 1 else [], lambda name: None), version(step))
        assert are_equal(read_alone(pods.shared), values)


def test_a_frozen_parameter_of_a_model_is_known_as_one() -> None:
    from tandem.kernels import select
    from tandem.layout.shapes import ModelShapes
    from tandem.model.decoder import Decoder
    from tandem.trainer.checkpoint.replica_state import ReplicaState
    from tandem.trainer.parallel.replica import make_replica

    model = Decoder(ModelShapes("llama", 32, 16, 2, 2, 2, 8, 24, 64, tie_word_embeddings=True), select("reference", torch.float32))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("layers.1."))
    from tandem.config.trainer import TrainerConfig

    shards = ReplicaState(make_replica(model, TrainerConfig(), alone())).weight_shards()
    assert {shard.name.startswith("model.layers.1.") for shard in shards if not shard.is_frozen} == {True}
    assert sum(shard.is_frozen for shard in shards) == 2 + 9 and len(shards) == 2 + 2 * 9


def test_the_same_version_is_registered_again_whole_and_repairs_what_was_damaged(pods: TwoPods, copied: list[int]) -> None:
    for step in range(3):
        pods.publish(tensors(1, 2, step), version(step))
    # A bit of a tensor that was not written for this version.
    flip(pods.buffers.segments, pods.shared, "t0")
    with pytest.raises(DamagedWeights, match="tensor 't0' of weights of step 2"):
        read_alone(pods.shared)
    copied.clear()
    pods.publish(tensors(1, 2, 2), version(2))
    assert copied == [SIZE] * 3 and are_equal(read_alone(pods.shared), tensors(1, 2, 2))


def test_a_buffer_that_another_process_has_written_is_written_whole(pods: TwoPods, copied: list[int]) -> None:
    for step in range(2):
        pods.publish(tensors(1, 2), version(step))
    pods.buffers.segments[0].contents = None
    copied.clear()
    pods.publish(tensors(1, 2), version(2))
    assert copied == [SIZE] * 2


def test_a_reader_copies_only_parts_whose_digest_it_does_not_hold(pods: TwoPods) -> None:
    reader = WeightReader(pods.shared)
    pods.publish(tensors(1, 2, 3), version(0))
    reader.read()
    pods.publish(tensors(1, 2, 7), version(1))
    # It would be found if it were read, as it is by a reader without a past.
    flip(pods.buffers.segments, pods.shared, "t1")
    assert are_equal(reader.read().tensors, tensors(1, 2, 7))
    with pytest.raises(DamagedWeights, match="'t1'"):
        read_alone(pods.shared)
    flip(pods.buffers.segments, pods.shared, "t1")
    # What it had copied over when it found damage does not count as held.
    pods.publish(tensors(1, 8, 7), version(2))
    flip(pods.buffers.segments, pods.shared, "t1")
    with pytest.raises(DamagedWeights, match="'t1'"):
        reader.read()
    flip(pods.buffers.segments, pods.shared, "t1")
    assert are_equal(reader.read().tensors, tensors(1, 8, 7))
    reader.close()


def test_readers_and_pods_at_any_base_hold_every_version_that_they_read(pods: TwoPods) -> None:
    """Random changes, random parts, and readers and a pod that miss versions: content decides what is copied, never a count of versions."""
    draw, seeds = random.Random(3), [0] * 5
    readers = [WeightReader(pods.shared) for _ in range(3)]
    for step in range(25):
        for i in draw.sample(range(5), draw.randrange(4)):
            seeds[i] = draw.randrange(4)
        sent, shards = tensors(*seeds), list[WeightShard]()
        for name, tensor in sent:
            cut, axis = draw.choice([0, 0, 20]), draw.randrange(2)
            boxes = [whole_offsets(SHAPE)]
            if cut:
                boxes = [ShardOffsets((0, 0), (cut, 400) if axis == 0 else (50, cut)), ShardOffsets((cut, 0) if axis == 0 else (0, cut), SHAPE)]
            shards += [WeightShard(name, SHAPE, box, tensor.dtype, lambda box=box, tensor=tensor: tensor[box.slices]) for box in boxes]
        pods.writer.publish(place_shards(alone().world, shards), version(step))
        for reader in readers:
            if draw.random() < 0.5:
                assert are_equal(reader.read(version(step)).tensors, sent)
        if draw.random() < 0.5:
            pods.bring(version(step))
            assert are_equal(read_alone(pods.own), sent)
    for reader in readers:
        reader.close()


def test_another_pod_fetches_only_parts_that_it_does_not_have(pods: TwoPods) -> None:
    # The second buffer of the other pod gets from its first what has not changed, also under another name (the last).
    for step, (seeds, count) in enumerate([((1, 2, 3, 4), 4), ((1, 2, 3, 5), 1), ((1, 2, 3, 6), 1), ((1, 2, 3, 6), 0), ((7, 2, 3, 1), 1)]):
        pods.publish(tensors(*seeds), version(step))
        assert pods.bring().fetched == ((), 0, SIZE * count), step
        assert are_equal(read_alone(pods.own), tensors(*seeds))


def test_a_flipped_bit_in_what_a_pod_copies_from_its_own_memory_is_fetched(pods: TwoPods) -> None:
    pods.publish(tensors(1, 2, 3), version(0))
    pods.bring()
    assert pods.mirror.buffers is not None
    flip(pods.mirror.buffers.segments, pods.own, "t1")
    pods.publish(tensors(1, 2, 4), version(1))
    assert pods.bring().fetched == ((), 0, SIZE * 2)
    assert are_equal(read_alone(pods.own), tensors(1, 2, 4))


def test_damage_in_the_memory_of_another_pod_is_repaired_when_the_weights_are_registered_again(pods: TwoPods) -> None:
    for step in range(3):
        pods.publish(tensors(1, 2, step), version(step))
        pods.bring()
    assert pods.mirror.buffers is not None
    for name in ("t0", "t2"):
        flip(pods.mirror.buffers.segments, pods.own, name)
    with pytest.raises(DamagedWeights, match="'t0'"):
        read_alone(pods.own)
    assert pods.bring().fetched.size_bytes == 0, "it is here, as far as the pod knows"
    pods.publish(tensors(1, 2, 2), version(2))
    # Both buffers had 't0'; the one that is written to now has it undamaged, and is compared because the weights were registered again.
    assert pods.bring().fetched.size_bytes == SIZE
    assert are_equal(read_alone(pods.own), tensors(1, 2, 2))


def test_after_a_transfer_that_failed_nothing_of_its_buffer_is_taken_for_granted(pods: TwoPods, monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.weight_transfer.transport.tcp_source import TcpSource

    for step in range(2):
        pods.publish(tensors(1, 2, step), version(step))
        pods.bring()
    pods.publish(tensors(1, 2, 8), version(2))
    read, failing = TcpSource.read, [True]

    def fail(*arguments: Any) -> None:
        if failing:
            failing.clear()
            raise OSError("broken")
        read(*arguments)

    monkeypatch.setattr(TcpSource, "read", fail)
    with pytest.raises(OSError, match="broken"):
        pods.bring()
    assert pods.mirror.buffers is not None
    held = current(pods.own)
    assert held is not None
    for entry in held[0].tensors:
        # In the buffer that the failed transfer wrote to, which is the free one.
        pods.mirror.buffers.other(entry.segment).memory[entry.offset_bytes] ^= 1
    assert pods.bring().fetched.size_bytes == SIZE, "the rest is copied from the other buffer, not left where it is"
    assert are_equal(read_alone(pods.own), tensors(1, 2, 8))
