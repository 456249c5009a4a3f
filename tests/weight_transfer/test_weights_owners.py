"""Weights with several owners: the engine receives the bytes of the Hugging Face folder."""

import random
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from model_ranks import LLAMA, QWEN3, QWEN3_MOE, Case
from owner_ranks import announced_versions, bytes_of_deltas, many_versions, one_fails, peak, registered, replica_of
from ranks import Ranks
from safetensors.torch import load_file
from two_pods import TwoPods

from tandem.layout.mesh import MeshShape
from tandem.layout.shapes import ModelShapes
from tandem.layout.shard_offsets import ShardOffsets, intersection, offsets_of_range, whole_offsets
from tandem.layout.sharding import ShardSpec, is_held, shard_slices
from tandem.model.huggingface.model_folder import save_model
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.process.deadline import Deadline
from tandem.runtime.rpc.calls import error_meta, raise_error
from tandem.types import DamagedWeights, RunError, WeightVersion
from tandem.weight_transfer import shared_memory
from tandem.weight_transfer.manifest import are_partition, part_offsets, segment_bytes
from tandem.weight_transfer.publication import current
from tandem.weight_transfer.shared_memory import WeightBuffers
from tandem.weight_transfer.update import WeightReader

TIED, UNTIED, MIXTURE = (Case(replace(shapes, num_hidden_layers=3), "float32", "cpu") for shapes in (QWEN3, LLAMA, QWEN3_MOE))
SUMMED = "partial sums: o_proj and down_proj are cut by columns"


class Shared:
    """The buffers and the store of one pod."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.buffers = WeightBuffers.create("test" + uuid.uuid4().hex[:8], size_bytes)
        self.store_path = folder / "store.sqlite"
        self.store = EmbeddedStore(self.store_path)

    def reader(self, **settings: Any) -> WeightReader:
        return WeightReader(self.store, **settings)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    made = Shared(tmp_path, 2 << 20)
    yield made
    made.store.close()
    made.buffers.close()


def folder_of(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    """The Hugging Face folder written by one process."""
    save_model(replica_of(None, case).model, folder)
    return load_file(folder / "model.safetensors")


def check_bytes(shared: Shared, wanted: dict[str, torch.Tensor]) -> None:
    reader = shared.reader()
    got = dict(reader.read(WeightVersion(1, 1)).tensors)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name].view(torch.int32), tensor.view(torch.int32)), name
    reader.close()


MESHES = [
    pytest.param(MeshShape(data=2), TIED, 0, 1, id="data 2"),
    pytest.param(MeshShape(data=2), UNTIED, 3, 1, id="data 2, ZeRO 3"),
    pytest.param(MeshShape(tensor=2), replace(UNTIED, deterministic=True), 0, 1, id="tensor 2"),
    pytest.param(MeshShape(tensor=2), TIED, 0, 1, id=f"tensor 2, {SUMMED}"),
    pytest.param(MeshShape(pipeline=2), TIED, 0, 1, id="pipeline 2, tied"),
    pytest.param(MeshShape(data=2, expert=2), MIXTURE, 0, 1, id="expert 2"),
    pytest.param(MeshShape(data=2), TIED, 1, 1, id="data 2, ZeRO 1", marks=pytest.mark.full),
    pytest.param(MeshShape(data=2), TIED, 2, 1, id="data 2, ZeRO 2", marks=pytest.mark.full),
    pytest.param(MeshShape(data=3), TIED, 3, 1, id="data 3, ZeRO 3", marks=pytest.mark.full),
    pytest.param(MeshShape(context=2), TIED, 3, 1, id="context 2, ZeRO 3", marks=pytest.mark.full),
    pytest.param(MeshShape(tensor=4), TIED, 0, 1, id="tensor 4 over 2 key-value heads", marks=pytest.mark.full),
    pytest.param(MeshShape(pipeline=2), replace(TIED, shapes=replace(QWEN3, num_hidden_layers=4)), 0, 2, id="pipeline 2, interleaved",
    marks=pytest.mark.full),
    pytest.param(MeshShape(data=2, tensor=2), TIED, 3, 1, id=f"data 2 x tensor 2, ZeRO 3, {SUMMED}", marks=pytest.mark.full),
    pytest.param(MeshShape(data=2, tensor=2), replace(UNTIED, deterministic=True), 3, 1, id="data 2 x tensor 2, ZeRO 3", marks=pytest.mark.full),
    pytest.param(MeshShape(data=2, tensor=2, expert=2), MIXTURE, 3, 1, id="data 2 x tensor 2, expert 2, ZeRO 3", marks=pytest.mark.full),
    pytest.param(MeshShape(data=2, pipeline=2), TIED, 3, 1, id="data 2 x pipeline 2, tied, ZeRO 3", marks=pytest.mark.full),
    pytest.param(MeshShape(data=2, tensor=2, pipeline=2), TIED, 3, 1, id="2 x 2 x 2, tied, ZeRO 3", marks=pytest.mark.full),
    pytest.param(MeshShape(data=2, tensor=2, pipeline=2), MIXTURE, 0, 1, id="2 x 2 x 2, experts", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("mesh", "case", "zero", "virtual"), MESHES)
def test_the_engine_gets_the_bytes_of_the_folder_that_one_process_writes(
    ranks: Ranks, shared: Shared, tmp_path: Path, mesh: MeshShape, case: Case, zero: Any, virtual: int
) -> None:
    wanted = folder_of(case, tmp_path / "model")
    told = ranks.run(mesh, registered, shared.buffers.names, shared.store_path, case, zero, virtual)
    check_bytes(shared, wanted)
    published = current(shared.store)
    assert published is not None and {digest for _, digest in told} == {published[0].digest}
    assert published[0].owners == tuple(range(mesh.world)), "every rank copies some"
    total = sum(tensor.nbytes for tensor in wanted.values())
    assert sum(size for size, _ in told) == total == published[0].size_bytes, "nothing is copied twice"
    assert segment_bytes(case.shapes, "float32") <= shared.buffers.size_bytes
    if mesh.world == mesh.data:
        assert max(size for size, _ in told) < 0.75 * total, "replicas divide the copying"


@pytest.mark.parametrize("zero", [1, 3])
def test_after_a_step_of_training_the_engine_gets_the_new_weights(ranks: Ranks, shared: Shared, tmp_path: Path, zero: Any) -> None:
    ranks.run(MeshShape(data=2), registered, shared.buffers.names, shared.store_path, TIED, zero, 1, None, (), tmp_path / "model")
    trained = load_file(tmp_path / "model" / "model.safetensors")
    assert not torch.equal(trained["model.norm.weight"], folder_of(TIED, tmp_path / "before")["model.norm.weight"])
    check_bytes(shared, trained)


PAGED = ("offload", "offload_parameters")


@pytest.mark.parametrize("size", [1, 2])
def test_weights_that_lie_in_a_file_are_registered_from_there(ranks: Ranks, shared: Shared, tmp_path: Path, size: int) -> None:
    wanted = folder_of(TIED, tmp_path / "model")
    zero = 3 if size > 1 else 0
    arguments = (shared.buffers.names, shared.store_path, TIED, zero, 1, tmp_path, PAGED)
    if size == 1:
        registered(None, *arguments)
    else:
        ranks.run(MeshShape(data=size), registered, *arguments)
    check_bytes(shared, wanted)


def test_a_flipped_byte_in_any_part_is_found_and_named(ranks: Ranks, shared: Shared) -> None:
    ranks.run(MeshShape(tensor=2), registered, shared.buffers.names, shared.store_path, TIED)
    published, draw = current(shared.store), random.Random(1)
    assert published is not None
    segment = next(s for s in shared.buffers.segments if s.name == published[0].tensors[0].segment)
    assert any(part.start[1:] != (0,) for entry in published[0].tensors for part in entry.parts if len(entry.shape) > 1), "some by columns"
    for entry in published[0].tensors:
        for part, offset in zip(entry.parts, part_offsets(entry), strict=True):
            at = offset + draw.randrange(4 * ShardOffsets(part.start, part.stop).numel)
            segment.memory[at] ^= 1
            # A reader that has verified the other parts would not read them again.
            reader = shared.reader()
            with pytest.raises(DamagedWeights, match=f"tensor '{entry.name}' of weights of step 1 .* was read twice"):
                reader.update(lambda tensors, version: pytest.fail("damaged weights were applied"))
            segment.memory[at] ^= 1
            assert reader.update(lambda tensors, version: None).rereads == ()
            reader.close()


def test_what_was_read_twice_is_told(ranks: Ranks, shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.run(MeshShape(tensor=2), registered, shared.buffers.names, shared.store_path, TIED)
    published, reader = current(shared.store), shared.reader()
    assert published is not None
    entry = published[0].tensors[4]
    segment = next(s for s in shared.buffers.segments if s.name == entry.segment)
    segment.memory[entry.offset_bytes + 5] ^= 1
    copy = reader._copy

    def heal(*arguments: Any) -> Any:
        found = copy(*arguments)
        if found[1]:
            segment.memory[entry.offset_bytes + 5] ^= 1
        return found

    monkeypatch.setattr(reader, "_copy", heal)
    seen: list[WeightVersion] = []
    updated = reader.update(lambda tensors, version: seen.append(version))
    assert updated.rereads == (entry.name,) and updated.size_bytes == published[0].size_bytes and seen == [updated.version]
    reader.close()


def test_damaged_weights_are_known_as_such_behind_a_call() -> None:
    with pytest.raises(DamagedWeights, match="one line"):
        raise_error(error_meta(DamagedWeights("one line")), "rollout", "update_weight")


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("owners", [1, 2])
def test_a_rank_of_an_engine_reads_its_own_slices(ranks: Ranks, shared: Shared, tmp_path: Path, owners: int, deterministic: bool) -> None:
    """With any sharding of the trainer: here whole tensors of one owner, or columns of two."""
    wanted, shapes = folder_of(TIED, tmp_path / "model"), TIED.shapes
    if owners == 1:
        registered(None, shared.buffers.names, shared.store_path, TIED)
    else:
        ranks.run(MeshShape(tensor=2), registered, shared.buffers.names, shared.store_path, TIED)
    for rank in range(2):
        cut = ShardSpec(rank, 2, deterministic)

        def box(name: str, shape: tuple[int, ...], cut: ShardSpec = cut) -> ShardOffsets | None:
            slices = shard_slices(shapes, name, shape, cut)
            return ShardOffsets(tuple(s.start for s in slices), tuple(s.stop for s in slices)) if is_held(shapes, name, cut) else None

        reader = shared.reader(wanted=box)
        weights = reader.read()
        for name, tensor in weights.tensors:
            assert torch.equal(tensor, wanted[name][shard_slices(shapes, name, tuple(wanted[name].shape), cut)]), name
        assert weights.size_bytes < 0.6 * sum(tensor.nbytes for tensor in wanted.values())
        reader.close()


def test_a_reader_beside_ranks_that_never_wait_sees_whole_versions_only(ranks: Ranks, shared: Shared) -> None:
    failure: list[BaseException] = []

    def write() -> None:
        try:
            ranks.run(MeshShape(data=2), many_versions, shared.buffers.names, shared.store_path, 60)
        except BaseException as error:
            failure.append(error)

    thread, reader, seen = threading.Thread(target=write), shared.reader(), list[int]()
    thread.start()
    while thread.is_alive() or not seen:
        try:
            got = reader.read()
        except RunError as error:
            assert "no weights are published" in str(error) or isinstance(error, DamagedWeights)
            assert thread.is_alive() or not failure
            continue
        assert {float(part) for _, tensor in got.tensors for part in (tensor.min(), tensor.max())} == {float(got.version.step)}
        seen.append(got.version.step)
    thread.join()
    assert not failure and seen == sorted(seen) and len(set(seen)) > 1
    assert {float(tensor.min()) for _, tensor in reader.read().tensors} == {60.0}
    reader.close()


def test_every_rank_copies_only_what_has_changed_of_its_own_parts(ranks: Ranks, shared: Shared) -> None:
    first, second = ranks.run(MeshShape(data=2), bytes_of_deltas, shared.buffers.names, shared.store_path)
    rows_bytes = [32 * (500 + i) * 4 for i in range(6)]
    assert first == [sum(rows_bytes)] * 2 + [rows_bytes[0]] * 2 and second == [sum(rows_bytes)] * 2 + [0] * 2
    received = shared.reader().read().tensors
    assert [(float(t[:32].min()), float(t[:32].max()), float(t[32:].max())) for _, t in received] == [(3.0, 3.0, 0.0)] + [(float(i),) * 3 for i in range(1, 6)]


def test_a_rank_that_fails_fails_all_in_one_line_and_the_next_version_is_registered(ranks: Ranks, shared: Shared, tmp_path: Path) -> None:
    found = ranks.run(MeshShape(data=2), one_fails, shared.buffers.names, shared.store_path, tmp_path, "raise")
    assert found == ["the weights of step 2 (incarnation 1) were not published: rank 1: [Errno 5] Input/output error"] * 2
    check_first(shared)
    ranks.run(MeshShape(data=2), many_versions, shared.buffers.names, shared.store_path, 3)
    assert shared.reader().read().version == WeightVersion(1, 3)


def test_a_rank_that_is_killed_in_the_middle_leaves_the_published_version(shared: Shared, tmp_path: Path) -> None:
    ranks = Ranks()
    with pytest.raises((EOFError, AssertionError)):
        ranks.run(MeshShape(data=2), one_fails, shared.buffers.names, shared.store_path, tmp_path, "kill")
    ranks.close()
    assert "\n" not in (tmp_path / "0").read_text() and not (tmp_path / "1").exists()
    check_first(shared)


def check_first(shared: Shared) -> None:
    reader = shared.reader()
    got = reader.read()
    assert got.version == WeightVersion(1, 1) and {float(part) for _, t in got.tensors for part in (t.min(), t.max())} == {1.0}
    reader.close()


LARGE = Case(ModelShapes("qwen3", 4000, 512, 6, 8, 4, 64, 1536, 128, False, qk_norm=True), "float32", "cpu")
MIB = 2**20


@pytest.mark.parametrize(
    ("mesh", "zero"),
    [
        pytest.param(MeshShape(data=2), 3, id="ZeRO 3"),
        pytest.param(MeshShape(tensor=2), 0, id="tensor 2", marks=pytest.mark.full),
        pytest.param(MeshShape(pipeline=2), 0, id="pipeline 2", marks=pytest.mark.full),
    ],
)
def test_no_rank_takes_more_memory_than_its_own_part_of_the_segment(
    ranks: Ranks, tmp_path: Path, mesh: MeshShape, zero: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The system counts a huge page whole for whoever touches a byte of it.
    monkeypatch.setattr(shared_memory, "has_huge_pages", lambda folder: False)
    shared = Shared(tmp_path, segment_bytes(LARGE.shapes, "float32"))
    try:
        found = ranks.run(mesh, peak, shared.buffers.names, shared.store_path, LARGE, zero)
    finally:
        shared.store.close()
        shared.buffers.close()
    total = segment_bytes(LARGE.shapes, "float32")
    assert total > 70 * MIB
    for own, grown, private in found:
        print(f"of {total / MIB:.0f} MiB: own part {own / MIB:.1f}, grown by {grown / MIB:.1f}, of which private {private / MIB:.1f}")
        assert grown < own + 6 * MIB and private < 6 * MIB


def test_boxes_are_a_partition_where_every_element_is_in_one() -> None:
    draw, seen = random.Random(4), set[bool]()
    for _ in range(2000):
        shape = tuple(draw.randrange(1, 4) for _ in range(draw.randrange(1, 4)))
        count = whole_offsets(shape).numel
        if draw.random() < 0.5:
            cuts = sorted({0, count, *(draw.randrange(count) for _ in range(2))})
            boxes = [box for a, b in pairwise(cuts) for box in offsets_of_range(shape, a, b)]
        else:
            corners = [[sorted(draw.choices(range(n + 1), k=2)) for n in shape] for _ in range(draw.randrange(1, 4))]
            boxes = [ShardOffsets(tuple(a for a, _ in corner), tuple(b for _, b in corner)) for corner in corners]
            boxes = [box for box in boxes if box.numel]
        boxes = sorted(boxes)
        if boxes and draw.random() < 0.3:
            del boxes[draw.randrange(len(boxes))]
        times = torch.zeros(shape)
        for box in boxes:
            times[box.slices] += 1
        assert are_partition(shape, boxes) == bool((times == 1).all()), (shape, boxes)
        assert all(intersection(box, whole_offsets(shape)) == box for box in boxes)
        seen.add(bool((times == 1).all()))
    assert seen == {True, False}


def test_every_rank_marks_its_own_parts_and_another_pod_reads_them_before_the_last_is_written(ranks: Ranks, tmp_path: Path) -> None:
    pods, goes_on = TwoPods(tmp_path), tmp_path / "go"
    pods.mirror.begin_early(WeightVersion(1, 1), ("tcp",), Deadline(60.0))

    def wait() -> None:
        ends = time.monotonic() + 30
        while sum(piece.is_verified for piece in list(pods.mirror._early._pieces)) < 10 and time.monotonic() < ends:  # type: ignore[union-attr]
            time.sleep(0.005)
        goes_on.touch()

    thread = threading.Thread(target=wait)
    thread.start()
    ranks.run(MeshShape(data=2), announced_versions, pods.buffers.names, tmp_path / "shared.sqlite", goes_on)
    thread.join()
    got = pods.bring(WeightVersion(1, 1))
    assert 0.8 * got.fetched.size_bytes < got.early_bytes and got.manifest.owners == (0, 1)
    with closing(WeightReader(pods.own)) as reader:
        assert all(float(tensor.min()) == float(tensor.max()) == float(name[1:]) for name, tensor in reader.read().tensors)
    pods.close()
