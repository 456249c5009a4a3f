"""Weights that are published in the layout of the engine's kernels: the same matrices for whoever reads them, and verified where they are."""

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.kernels import select
from tandem.kernels.cpu.kernels import CpuKernels
from tandem.layout.shard_offsets import ShardOffsets, whole_offsets
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.trainer.checkpoint.replica_state import WeightShard
from tandem.trainer.parallel.ranks import alone
from tandem.types import DamagedWeights, RunError, WeightVersion
from tandem.weight_transfer.convert import ConvertedWeights, place_shards
from tandem.weight_transfer.copying import Threads
from tandem.weight_transfer.manifest import from_json, make_manifest, to_json
from tandem.weight_transfer.publication import current
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import OpenSegments, WeightBuffers
from tandem.weight_transfer.shared_weights import SharedReader, SharedWeights
from tandem.weight_transfer.update import WeightReader

AT = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (80, 40),
    f"{AT}self_attn.q_proj.weight": (128, 40),
    f"{AT}self_attn.k_proj.weight": (64, 40),
    f"{AT}self_attn.v_proj.weight": (64, 40),
    f"{AT}self_attn.o_proj.weight": (48, 128),
    f"{AT}mlp.gate_proj.weight": (72, 40),
    f"{AT}mlp.up_proj.weight": (72, 40),
    f"{AT}mlp.down_proj.weight": (40, 72),
    "model.norm.weight": (40,),
}
IN_PANELS = ["model.embed_tokens.weight", *(f"{AT}self_attn.{name}_proj.weight" for name in "qkvo")]
QKV = [f"{AT}self_attn.{name}_proj.weight" for name in "qkv"]
kernels = select("cpu")
assert isinstance(kernels, CpuKernels)


def version(step: int) -> WeightVersion:
    return WeightVersion(1, step)


def random_weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def in_parts(tensors: dict[str, Tensor], first_rows: int = 0) -> ConvertedWeights:
    """``tensors`` of one rank, in panels where that is possible; matrices with more than ``first_rows`` rows, if that is not 0, in two parts."""
    shards = []
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        boxes = [whole_offsets(shape)]
        if first_rows and len(shape) == 2 and shape[0] > first_rows:
            boxes = [ShardOffsets((0, 0), (first_rows, shape[1])), ShardOffsets((first_rows, 0), shape)]
        shards += [WeightShard(name, shape, box, tensor.dtype, lambda tensor=tensor, box=box: tensor[box.slices]) for box in boxes]
    return place_shards(alone().world, shards, list(tensors), engine_layout="panels")


def panels_of(plain: Tensor) -> Tensor:
    """What the layout is by its definition: 64 rows at a time, each transposed."""
    return torch.cat([rows.t().reshape(-1) for rows in plain.split(64)])


class Host:
    def __init__(self, folder: Path) -> None:
        self.buffers, self.store = WeightBuffers.create("test" + uuid.uuid4().hex[:8], 1 << 18), EmbeddedStore(folder / "store.sqlite")
        self.writer = WeightWriter(WeightBuffers.open(self.buffers.names), self.store, 2, kernels)
        self.threads, self.segments = Threads(2), OpenSegments()

    def take(self, step: int, *, verifies: bool = True) -> SharedWeights | None:
        return SharedReader(self.store, self.threads, self.segments).take(version(step), "panels", verifies=verifies)

    def flip(self, name: str) -> None:
        entry = next(entry for entry in self.manifest().tensors if entry.name == name)
        next(each for each in self.buffers.segments if each.name == entry.segment).memory[entry.offset_bytes + 5] ^= 4

    def manifest(self):
        found = current(self.store)
        assert found is not None
        return found[0]

    def close(self) -> None:
        self.threads.close()
        self.segments.close()
        self.writer.close()
        self.buffers.close()
        self.store.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("first_rows", [0, 64])
def test_matrices_that_stack_are_published_in_panels_one_behind_the_other_and_all_others_in_rows(host: Host, first_rows: int) -> None:
    weights = random_weights(1)
    manifest = host.writer.publish(in_parts(weights, first_rows), version(0))
    assert [entry.name for entry in manifest.tensors if entry.layout == "panels"] == IN_PANELS
    shared = host.take(0)
    assert shared is not None and shared.are_there and shared.in_panels == set(IN_PANELS)
    for name in IN_PANELS:
        assert torch.equal(shared.tensors[name], panels_of(weights[name])), name
    stack = torch.cat([shared.tensors[name] for name in QKV])
    assert torch.equal(stack, kernels.pack(torch.cat([weights[name] for name in QKV])).data)
    ends = [shared.tensors[name].data_ptr() + shared.tensors[name].nbytes for name in QKV]
    assert [shared.tensors[name].data_ptr() for name in QKV[1:]] == ends[:2]
    assert torch.equal(shared.tensors[f"{AT}mlp.gate_proj.weight"], weights[f"{AT}mlp.gate_proj.weight"])


def test_parts_that_cut_a_panel_are_published_in_rows(host: Host) -> None:
    manifest = host.writer.publish(in_parts(random_weights(1), 32), version(0))
    # The embedding, q, k, v and the output all have more than 32 rows.
    assert all(entry.layout == "rows" for entry in manifest.tensors) and host.take(0) is None


@pytest.mark.parametrize("first_rows", [0, 64])
@pytest.mark.parametrize("how", ["read", "view"])
def test_a_reader_that_copies_gets_the_same_matrices_whole_and_in_slices(host: Host, how: str, first_rows: int) -> None:
    weights = random_weights(2)
    host.writer.publish(in_parts(weights, first_rows), version(0))
    cuts = {
        "whole": lambda shape: whole_offsets(shape),
        "rows": lambda shape: ShardOffsets((5, *(0 for _ in shape[1:])), (shape[0] - 7, *shape[1:])),
        "columns": lambda shape: ShardOffsets((*(0 for _ in shape[1:]), 3), (*shape[:-1], shape[-1] - 2)),
    }
    for cut in cuts.values():
        reader = WeightReader(host.store, wanted=lambda name, shape, cut=cut: cut(shape))
        for name, tensor in getattr(reader, how)(version(0)).tensors:
            assert torch.equal(tensor, weights[name][cut(tuple(weights[name].shape)).slices]), name
        reader.close()


def test_a_flipped_bit_is_found_by_everybody_who_verifies_and_its_matrix_is_named(host: Host) -> None:
    host.writer.publish(in_parts(random_weights(3)), version(0))
    host.flip(QKV[1])
    with pytest.raises(DamagedWeights, match=QKV[1]):
        host.take(0)
    with pytest.raises(DamagedWeights, match=QKV[1]):
        WeightReader(host.store).read(version(0))
    assert host.take(0, verifies=False) is not None, "its caller verifies"


def test_whoever_holds_a_version_can_tell_when_its_memory_is_written_to(host: Host) -> None:
    weights = random_weights(4)
    host.writer.publish(in_parts(weights), version(0))
    first = host.take(0)
    host.writer.publish(in_parts(random_weights(5)), version(1))
    second = host.take(1)
    assert first is not None and first.are_there and second is not None and second.are_there, "the next version was written beside it"
    assert torch.equal(first.tensors[IN_PANELS[0]], panels_of(weights[IN_PANELS[0]]))
    host.writer.publish(in_parts(random_weights(6)), version(2))
    assert not first.are_there and second.are_there
    with pytest.raises(RunError, match="step 2"):
        host.take(1)


def test_what_has_not_changed_is_not_written_again_and_what_has_changed_is(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, written, write = random_weights(7), list[int](), CpuKernels.write_panels
    host.writer.publish(in_parts(weights), version(0))
    host.writer.publish(in_parts(weights), version(1))
    monkeypatch.setattr(CpuKernels, "write_panels", lambda self, weight, to: (written.append(weight.nbytes * (to is not None)), write(self, weight, to))[1])
    # The middle of a matrix, which no sample sees.
    weights[QKV[0]][70, 17] += 1.0
    host.writer.publish(in_parts(weights), version(2))
    assert sum(written) == weights[QKV[0]].nbytes
    shared = host.take(2)
    assert shared is not None and torch.equal(shared.tensors[QKV[0]], panels_of(weights[QKV[0]]))


def test_a_manifest_says_what_is_in_panels_and_refuses_panels_that_are_cut(host: Host) -> None:
    manifest = host.writer.publish(in_parts(random_weights(8), 64), version(0))
    assert from_json(to_json(manifest)) == manifest
    in_rows = make_manifest(version(0), [replace(entry, layout="rows") for entry in manifest.tensors])
    assert in_rows.digest != manifest.digest, "the same bytes are other weights in another layout"
    first = manifest.tensors[0]
    parts = (replace(first.parts[0], stop=(32, 40)), replace(first.parts[1], start=(32, 0)))
    cut = make_manifest(version(0), [replace(first, parts=parts), *manifest.tensors[1:]])
    with pytest.raises(ValueError, match=f"'{first.name}'.*whole panels"):
        from_json(to_json(cut))
