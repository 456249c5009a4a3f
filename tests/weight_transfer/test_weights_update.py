import json
import subprocess
import sys
import threading
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from whole_tensors import converted

from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.rpc.calls import PeerDied
from tandem.types import DamagedWeights, PartEntry, RunError, TensorEntry, WeightVersion
from tandem.weight_transfer.convert import convert
from tandem.weight_transfer.copying import CHUNK_BYTES, Threads, address_of, copy_and_digest
from tandem.weight_transfer.manifest import check, from_json, make_manifest, segment_bytes, to_json
from tandem.weight_transfer.publication import KEY, current, publish
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import WeightBuffers
from tandem.weight_transfer.update import WeightReader

HELPER = str(Path(__file__).parent / "helpers_weights.py")


def start(*arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, HELPER, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(30, 17, generator=generator)
    return [
        ("embed", torch.randn(1000, 300, generator=generator)),
        ("q", fused[:20]),
        ("k", fused[20:25]),
        ("transposed", torch.randn(40, 50, generator=generator).t()),
        ("scale", torch.randn(7, generator=generator, dtype=torch.float64)),
        ("half", torch.randn(33, generator=generator).to(torch.bfloat16)),
        ("scalar", torch.tensor(3.5)),
        ("nothing", torch.empty(0, 5)),
        ("odd", torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])),
    ]


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.fixture
def pod(tmp_path):
    torch.set_num_threads(1)
    name = "test" + uuid.uuid4().hex[:8]
    buffers = WeightBuffers.create(name, 2 << 20)
    store = EmbeddedStore(tmp_path / "store.sqlite")
    yield buffers, store
    store.close()
    buffers.close()


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def writer(pod, request):
    made = WeightWriter(WeightBuffers.open(pod[0].names), pod[1], request.param)
    yield made
    made.close()


@pytest.fixture
def reader(pod):
    made = WeightReader(pod[1])
    yield made
    made.close()


def test_every_tensor_arrives_byte_for_byte_version_after_version(writer, reader):
    for step in range(4):
        manifest = writer.publish(converted(weights(step)), WeightVersion(1, step))
        got = reader.read(WeightVersion(1, step))
        assert got.version == WeightVersion(1, step) and got.digest == manifest.digest
        for (name, sent), (same, received) in zip(weights(step), got.tensors, strict=True):
            assert name == same and sent.dtype == received.dtype and sent.shape == received.shape
            assert raw(sent) == raw(received)


def test_digests_are_those_of_the_bytes_and_places_are_aligned(writer):
    manifest = writer.publish(converted(weights(1)), WeightVersion(1, 1))
    for (_, tensor), entry in zip(weights(1), manifest.tensors, strict=True):
        assert [part.digest for part in entry.parts] == [xxhash.xxh3_128_hexdigest(raw(tensor))]
        assert entry.offset_bytes % 64 == 0 and entry.size_bytes == len(raw(tensor))


def test_the_published_buffer_is_not_written_to(writer, pod):
    first = writer.publish(converted(weights(1)), WeightVersion(1, 1))
    kept = bytes(pod[0].segments[0].memory)
    second = writer.publish(converted(weights(2)), WeightVersion(1, 2))
    third = writer.publish(converted(weights(3)), WeightVersion(1, 3))
    segments = [manifest.tensors[0].segment for manifest in (first, second, third)]
    assert segments == [pod[0].names[0], pod[0].names[1], pod[0].names[0]]
    assert bytes(pod[0].segments[0].memory) != kept


def test_the_engine_gets_all_tensors_of_one_version_in_one_call(writer, reader):
    calls = []
    writer.publish(converted(weights(5)), WeightVersion(2, 5))
    reader.update(lambda tensors, version: calls.append((len(tensors), version)))
    assert calls == [(9, WeightVersion(2, 5))]


@pytest.mark.parametrize("at", [0, 600_000, 1_199_999])
def test_a_corrupted_byte_is_caught_before_anything_is_applied(writer, reader, pod, at):
    manifest = writer.publish(converted(weights(1)), WeightVersion(1, 1))
    entry = manifest.tensors[0]
    segment = next(segment for segment in pod[0].segments if segment.name == entry.segment)
    segment.memory[entry.offset_bytes + at] ^= 1
    applied = []
    with pytest.raises(DamagedWeights, match=r"tensor 'embed' of weights of step 1 \(incarnation 1\) was read twice"):
        reader.update(lambda tensors, version: applied.append(version))
    assert applied == []
    segment.memory[entry.offset_bytes + at] ^= 1
    reader.update(lambda tensors, version: applied.append(version))
    assert applied == [WeightVersion(1, 1)]


def test_a_mismatch_is_read_once_more_from_the_manifest_on(writer, reader, pod):
    """The writer publishes two versions between the reader's manifest and its copy, so the buffer is overwritten under the reader."""
    writer.publish(converted(weights(1)), WeightVersion(1, 1))
    manifest = reader._manifest
    handed_out = []

    def overtaken(version):
        found = manifest(version)
        if not handed_out:
            writer.publish(converted(weights(2)), WeightVersion(1, 2))
            writer.publish(converted(weights(3)), WeightVersion(1, 3))
        handed_out.append(found[0].version.step)
        return found

    reader._manifest = overtaken
    got = reader.read()
    assert handed_out == [1, 3] and got.version.step == 3
    assert all(raw(a) == raw(b) for (_, a), (_, b) in zip(weights(3), got.tensors, strict=True))


def test_asking_for_another_version_than_the_published_one_is_refused(writer, reader):
    with pytest.raises(RunError, match="no weights are published"):
        reader.read()
    writer.publish(converted(weights(1)), WeightVersion(1, 1))
    with pytest.raises(RunError, match=r"of step 2 \(incarnation 1\) were requested, but of step 1"):
        reader.read(WeightVersion(1, 2))


def test_the_private_memory_is_used_again(writer, reader):
    places = []
    for step in range(3):
        writer.publish(converted(weights(step)), WeightVersion(1, step))
        places.append(reader.read().tensors[0][1].data_ptr())
    assert len(set(places)) == 1


def test_a_new_owner_s_segments_follow_an_old_one_s(writer, reader, pod):
    writer.publish(converted(weights(1)), WeightVersion(1, 9))
    reader.read()
    fresh = WeightBuffers.create("test" + uuid.uuid4().hex[:8], 2 << 20)
    replaced = WeightWriter(fresh, pod[1], 1)
    replaced.publish(converted(weights(2)), WeightVersion(2, 3))
    got = reader.read(WeightVersion(2, 3))
    assert raw(got.tensors[0][1]) == raw(weights(2)[0][1])
    with pytest.raises(RunError, match="from a trainer that has been replaced"):
        writer.publish(converted(weights(3)), WeightVersion(1, 10))
    assert current(pod[1])[0].version == WeightVersion(2, 3)
    replaced.close()


def test_a_shim_that_went_with_its_segments_is_named_as_such(pod, tmp_path, reader):
    gone = WeightBuffers.create("test" + uuid.uuid4().hex[:8], 2 << 20)
    writer = WeightWriter(gone, pod[1], 1)
    writer.publish(converted(weights(1)), WeightVersion(1, 1))
    writer.close()
    with pytest.raises(PeerDied, match="the trainer's shim has ended") as caught:
        reader.read()
    assert caught.value.peer == "trainer"


def test_the_same_version_may_be_registered_again_with_the_same_bytes_only(writer, pod):
    first = writer.publish(converted(weights(1)), WeightVersion(1, 1))
    again = writer.publish(converted(weights(1)), WeightVersion(1, 1))
    assert first.digest == again.digest and first.tensors[0].segment != again.tensors[0].segment
    with pytest.raises(RunError, match="not newer than the published"):
        writer.publish(converted(weights(2)), WeightVersion(1, 1))
    with pytest.raises(RunError, match="not newer than the published"):
        writer.publish(converted(weights(1)), WeightVersion(1, 0))
    assert current(pod[1])[0] == again


def test_tensors_that_do_not_fit_are_refused_and_nothing_is_published(writer, pod):
    with pytest.raises(RunError, match="the shared memory has"):
        writer.publish(converted([("big", torch.zeros(1 << 20))]), WeightVersion(1, 1))
    assert current(pod[1]) is None


def test_of_racing_incarnations_the_newest_wins_and_none_goes_back(tmp_path):
    path = tmp_path / "store.sqlite"
    racers = [start("race", path, incarnation, 30) for incarnation in (1, 2, 3, 4)]
    taken = [[int(step) for step in racer.communicate(timeout=60)[0].split()] for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 4
    store = EmbeddedStore(path)
    assert current(store)[0].version == WeightVersion(4, 29)
    assert taken[3] == list(range(30))
    assert all(steps == list(range(len(steps))) for steps in taken)
    with pytest.raises(RunError, match="replaced"):
        publish(store, make_manifest(WeightVersion(3, 10_000), []))
    store.close()


@pytest.mark.full
def test_a_reader_beside_a_writer_that_never_waits_sees_whole_versions_only(pod):
    buffers, store = pod
    reader = WeightReader(store)
    seen: list[int] = []
    refused = 0
    with start("write_versions", store.path, *buffers.names, 150) as process:
        while process.poll() is None or not seen:
            try:
                got = reader.read()
            except RunError as error:
                assert "no weights are published" in str(error) or "was read twice" in str(error)
                refused += 1
                continue
            values = {float(part) for _, tensor in got.tensors for part in (tensor.min(), tensor.max())}
            assert values == {float(got.version.step)}
            seen.append(got.version.step)
    assert process.returncode == 0
    assert seen == sorted(seen) and len(set(seen)) > 1
    assert {float(t.min()) for _, t in reader.read().tensors} == {150.0}
    reader.close()


# -- the manifest ------------------------------------------------------------------------------------------------------


WHOLE = PartEntry(0, (0, 0), (2, 3), "0" * 32)


def entry(name: str, offset: int = 0, **changes: object) -> TensorEntry:
    made = TensorEntry(name, "float32", (2, 3), "tandem-p-1-weights-0", offset, 24, (WHOLE,))
    return replace(made, **changes)


def test_a_manifest_comes_back_from_its_json():
    manifest = make_manifest(WeightVersion(2, 7), [entry("a"), entry("b", 64, shape=(), size_bytes=4, parts=(PartEntry(3, (), (), "1" * 32),))])
    assert from_json(to_json(manifest)) == manifest


def test_the_digest_covers_names_shapes_and_bytes_but_not_places():
    one = make_manifest(WeightVersion(1, 1), [entry("a")])
    assert make_manifest(WeightVersion(2, 9), [entry("a", 128, segment="tandem-p-1-weights-1")]).digest == one.digest
    assert make_manifest(WeightVersion(1, 1), [entry("a", parts=(replace(WHOLE, owner=5),))]).digest == one.digest
    for change in ({"name": "b"}, {"shape": (3, 2)}, {"parts": (replace(WHOLE, digest="1" * 32),)}, {"dtype": "float16"}):
        assert make_manifest(WeightVersion(1, 1), [entry("a", **change) if "name" not in change else entry("b")]).digest != one.digest


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ([entry("a"), entry("a", 64)], "twice"),
        ([entry("a"), entry("b", 0)], "overlaps"),
        ([entry("a", 32)], "unaligned"),
        ([entry("a", size_bytes=23)], "says 23 bytes"),
        ([entry("a", dtype="object")], "says 24 bytes"),
        ([entry("a", segment="../../etc/passwd")], "segment"),
        ([entry("a", parts=(replace(WHOLE, digest="short"),))], "digest"),
        ([entry("a", parts=())], "cover"),
        ([entry("a", parts=(replace(WHOLE, stop=(2, 2)),))], "cover"),
        ([entry("a", parts=(replace(WHOLE, stop=(2,)),))], "cover"),
        ([entry("a", parts=(replace(WHOLE, stop=(1, 3)), replace(WHOLE, stop=(1, 3))))], "cover"),
        ([entry("a", parts=(replace(WHOLE, start=(1, 0)), replace(WHOLE, stop=(1, 3))))], "cover"),
        ([entry("a", parts=(replace(WHOLE, stop=(2, 2)), replace(WHOLE, start=(0, 1), stop=(2, 2))))], "cover"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(entries, complaint):
    with pytest.raises(ValueError, match=complaint):
        check(make_manifest(WeightVersion(1, 1), entries))


def test_a_tampered_or_broken_manifest_is_refused(pod):
    good = to_json(make_manifest(WeightVersion(1, 1), [entry("a")]))
    changed = json.loads(good)
    changed["tensors"][0][-1][0][-1] = "1" * 32
    for broken in (json.dumps(changed).encode(), good[:-1], b"[]", b'{"version": [1, 1]}', good.replace(b"[1,1]", b'["1",1]')):
        with pytest.raises(ValueError, match="manifest"):
            from_json(broken)
        pod[1].put(KEY, broken)
        with pytest.raises(RunError, match="register them again"):
            current(pod[1])


def test_a_broken_manifest_is_replaced_by_registering_again(writer, reader, pod):
    writer.publish(converted(weights(1)), WeightVersion(1, 1))
    pod[1].put(KEY, b"[]")
    with pytest.raises(DamagedWeights):
        reader.read()
    writer.publish(converted(weights(1)), WeightVersion(1, 1))
    assert raw(reader.read(WeightVersion(1, 1)).tensors[0][1]) == raw(weights(1)[0][1])


# -- copying -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 63, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 17])
def test_a_copy_in_chunks_has_the_digest_of_the_whole(size):
    generator = torch.Generator().manual_seed(size)
    source = bytearray(torch.randint(0, 256, (size + 1,), dtype=torch.uint8, generator=generator).numpy().tobytes())
    for of_source in (True, False):
        copy = bytearray(size + 1)
        addresses = address_of(memoryview(copy)), address_of(memoryview(source))
        digest = copy_and_digest(*addresses, size, of_source=of_source)
        assert copy[:size] == source[:size] and copy[size] == 0
        assert digest == xxhash.xxh3_128_hexdigest(bytes(source[:size]))


def test_a_thread_that_is_held_up_leaves_the_rest_to_the_other_and_results_are_in_order():
    threads, done = Threads(2), threading.Event()

    def work(item: int) -> int:
        if item == 5:
            # The heaviest, which is taken first: the others are all done by the other thread meanwhile.
            assert done.wait(60)
        elif item == 1:
            done.set()
        return 10 * item

    def fail(item: int) -> int:
        raise IndexError(f"of the work {item}")

    assert threads.map(work, [1, 5, 2, 3, 4], [1, 5, 2, 3, 4]) == [10, 50, 20, 30, 40]
    with pytest.raises(IndexError, match="of the work"):
        threads.map(fail, [1, 2, 3], [1, 2, 3])
    threads.close()


# -- conversion --------------------------------------------------------------------------------------------------------


def test_a_decoder_converts_to_every_parameter_of_the_architecture_and_fills_its_segment():
    from tandem.config.trainer import TrainerConfig
    from tandem.kernels import select
    from tandem.layout.parameters import parameters
    from tandem.layout.shapes import ModelShapes
    from tandem.model.decoder import Decoder
    from tandem.model.huggingface.model_folder import to_huggingface
    from tandem.trainer.checkpoint.replica_state import ReplicaState
    from tandem.trainer.optimizers.make import make_optimizer
    from tandem.trainer.parallel.ranks import alone
    from tandem.trainer.parallel.replica import Replica

    shapes = ModelShapes("qwen3", 99, 32, 2, 4, 2, 8, 48, 64, tie_word_embeddings=True, qk_norm=True)
    decoder = Decoder(shapes, select("reference"))
    optimizer = make_optimizer(decoder, TrainerConfig())
    found = convert(ReplicaState(Replica(alone(), decoder, optimizer)))
    assert [(tensor.name, tensor.shape) for tensor in found.tensors] == list(parameters(shapes))
    assert [part.read().data_ptr() for part in found.own] == [tensor.data_ptr() for _, tensor in to_huggingface(decoder)], "views"
    assert all(not part.read().requires_grad for part in found.own)
    assert segment_bytes(shapes, "float32") == sum(-(-4 * part.read().numel() // 64) * 64 for part in found.own)
