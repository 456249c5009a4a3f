"""Sharded checkpoints: a checkpoint of one mesh is read bit for bit on any other, which reads only what it needs."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankContext, Ranks
from safetensors.torch import load_file

from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.mesh import MeshShape
from tandem.layout.parameters import parameters
from tandem.layout.shapes import ModelShapes
from tandem.layout.shard_offsets import ShardOffsets, whole_offsets
from tandem.layout.sharding import ShardSpec, shard_slices
from tandem.model.families import mixtral
from tandem.trainer.checkpoint import write
from tandem.trainer.checkpoint.checkpointer import Checkpointer
from tandem.trainer.checkpoint.find import newest_whole
from tandem.trainer.checkpoint.format.manifest import verify
from tandem.trainer.checkpoint.format.shard import Key, Shard, flat_shards
from tandem.trainer.checkpoint.read import Contents
from tandem.types import RunError, UserError

SHAPES = ModelShapes("qwen3", 61, 32, 3, 4, 2, 8, 48, 64, False, qk_norm=True)
MIXTURE = ModelShapes("mixtral", 61, 32, 2, 4, 2, 8, 48, 64, True, experts=ExpertShapes(4, 2, 48, names=mixtral.NAMES))

HYBRID = ModelShapes("qwen3_next", 61, 32, 2, 4, 2, 8, 48, 64, False, attention_gate=True, linear_attention=LinearAttention((0,), 4, 8, 6, 5, 4))


def whole(shapes: ModelShapes, state: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns the whole state, the same on every rank."""
    dtype = torch.bfloat16 if state == "weights" else torch.float32
    found = {}
    for number, (name, shape) in enumerate(parameters(shapes)):
        generator = torch.Generator().manual_seed(1000 * seed + 7 * number + len(state))
        found[name] = torch.randn(shape, generator=generator).to(dtype)
    return found


def part(shapes: ModelShapes, name: str, size: tuple[int, ...], cut: ShardSpec) -> ShardOffsets:
    slices = shard_slices(shapes, name, size, cut)
    return ShardOffsets(tuple(s.start for s in slices), tuple(s.stop for s in slices))


def shards(here: RankContext, shapes: ModelShapes, deterministic: bool, seed: int = 0, empty: bool = False) -> list[Shard]:
    """Weights sharded by tensor-parallel rank and equal on all data-parallel ranks; moments also sharded flat over the data-parallel ranks,
    as by ZeRO."""
    cut = ShardSpec(here.mesh.coordinate("tensor"), here.mesh.shape.tensor, deterministic)
    found = []
    for name, tensor in whole(shapes, "weights", seed).items():
        box = part(shapes, name, tuple(tensor.shape), cut)
        own = tensor[box.slices].contiguous()
        found.append(Shard(Key("weights", name), tuple(tensor.shape), box, torch.zeros_like(own) if empty else own))
    place, size = here.mesh.coordinate("data"), here.mesh.shape.data
    for name, tensor in whole(shapes, "exp_avg", seed).items():
        box = part(shapes, name, tuple(tensor.shape), cut)
        flat = tensor[box.slices].reshape(-1)
        first, stop = flat.numel() * place // size, flat.numel() * (place + 1) // size
        values = flat[first:stop].clone()
        found += flat_shards(Key("exp_avg", name), tuple(tensor.shape), box, first, torch.zeros_like(values) if empty else values)
    return found


def save(here: RankContext, folder: Path, shapes: ModelShapes, deterministic: bool, steps: list[int]) -> float:
    checkpointer = Checkpointer(folder, 2, here.groups["world"], {"data": here.mesh.shape.data, "tensor": here.mesh.shape.tensor})
    held = shards(here, shapes, deterministic)
    checkpointer.prepare(held)
    for step in steps:
        stall = checkpointer.save(step, shards(here, shapes, deterministic, seed=step), {"updates": step}, {"rank": here.mesh.rank})
    checkpointer.wait()
    done = checkpointer.take_committed()
    assert done is not None and done.step == steps[-1] and checkpointer.take_committed() is None
    checkpointer.close()
    return stall


def load(here: RankContext, folder: Path, shapes: ModelShapes, deterministic: bool) -> dict[str, Any]:
    found = newest_whole(folder, here.groups["world"])
    assert found is not None
    target = shards(here, shapes, deterministic, empty=True)
    contents = Contents(found.folder, found.manifest)
    read = contents.read(target)
    wanted = shards(here, shapes, deterministic, seed=found.step)
    return {
        "equal": all(torch.equal(a.tensor, b.tensor) for a, b in zip(target, wanted, strict=True)),
        "bytes": sum(shard.tensor.nbytes for shard in target),
        "read": read,
        "state": found.manifest.state,
        "own": contents.own(here.mesh.rank, here.mesh.shape.world),
        "digest": found.digest,
    }


WRITERS = [MeshShape(data=2, tensor=2), MeshShape(data=4), MeshShape()]
READERS = [MeshShape(), MeshShape(tensor=4), MeshShape(data=3), MeshShape(data=2, tensor=2)]


@pytest.mark.parametrize("shapes", [SHAPES, MIXTURE, pytest.param(HYBRID, marks=pytest.mark.full)], ids=["dense", "mixture", "hybrid"])
@pytest.mark.parametrize("writer", WRITERS, ids=str)
def test_what_a_mesh_writes_every_other_mesh_reads_bit_for_bit(writer: MeshShape, shapes: ModelShapes, ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(writer, save, tmp_path, shapes, True, [3, 4])
    for reader in READERS:
        for answer in ranks.run(reader, load, tmp_path, shapes, False):
            assert answer["equal"] and answer["state"] == {"updates": 4}
            assert (answer["own"] is None) == (reader.world != writer.world)


def test_files_hold_every_number_once_and_are_safetensors_that_others_read(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(MeshShape(data=2, tensor=2), save, tmp_path, SHAPES, False, [5])
    wanted = {f"{state}/{name}": t for state in ("weights", "exp_avg") for name, t in whole(SHAPES, state, 5).items()}
    found = {label: torch.full_like(tensor, torch.nan) for label, tensor in wanted.items()}
    sizes = []
    for rank in range(4):
        held = load_file(tmp_path / "step-5" / f"rank-{rank:05d}.safetensors")
        sizes.append(sum(tensor.nbytes for tensor in held.values()))
        for label, tensor in held.items():
            name, _, where = label[:-1].partition("[")
            slices = tuple(slice(*map(int, ends.split(":"))) for ends in where.split(","))
            assert found[name][slices].isnan().all(), "written twice"
            found[name][slices] = tensor
    assert all(torch.equal(found[label], wanted[label]) for label in wanted)
    assert max(sizes) - min(sizes) < 0.1 * max(sizes), "the ranks share the work"


def small_chunks(here: RankContext, bytes_: int) -> None:
    write.CHUNK_BYTES = bytes_


def test_rank_reads_only_the_chunks_that_cover_its_own_part(ranks: Ranks, tmp_path: Path) -> None:
    shape = MeshShape(tensor=4)
    ranks.run(shape, small_chunks, 256)
    try:
        ranks.run(shape, save, tmp_path, SHAPES, True, [1])
    finally:
        ranks.run(shape, small_chunks, 4 << 20)
    total = sum(path.stat().st_size for path in (tmp_path / "step-1").glob("*.safetensors"))
    for answer in ranks.run(shape, load, tmp_path, SHAPES, True):
        assert answer["equal"]
        # Each of its tensors may begin and end within a chunk.
        assert answer["bytes"] <= answer["read"] < answer["bytes"] + 2 * 256 * 2 * len(list(parameters(SHAPES)))
        assert answer["read"] < 0.6 * total


def save_while_training(here: RankContext, folder: Path) -> dict[str, Any]:
    """The weights change while the thread is blocked; a second save waits for the first."""
    import threading

    going_on, reached = threading.Event(), threading.Event()

    def point(name: str) -> None:
        if name == "before:checkpoint_write:1":
            reached.set()
            assert going_on.wait(60)

    held = [shard for shard in shards(here, SHAPES, True, seed=1) if shard.key.state == "weights"]
    checkpointer = Checkpointer(folder, 2, here.groups["world"], {}, fault_point=point)
    checkpointer.save(1, held, {})
    assert reached.wait(60), "save has returned and the thread is at work"
    for shard in held:
        shard.tensor.zero_()
    assert checkpointer.take_committed() is None
    assert not (folder / "step-1").exists()
    memory = checkpointer._staging
    threading.Timer(1.0, going_on.set).start()
    began = time.perf_counter()
    stall = checkpointer.save(2, held, {})
    assert stall >= 0.1 and stall <= time.perf_counter() - began, "the wait for the first is part of the second's stall"
    assert checkpointer._staging is memory, "the memory is used again"
    checkpointer.wait()
    checkpointer.close()
    return {}


def test_training_goes_on_after_the_copy_and_what_is_written_is_the_state_of_the_save(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(MeshShape(data=2), save_while_training, tmp_path)
    for step, seed in ((1, 1), (2, None)):
        manifest, _ = verify(tmp_path / f"step-{step}")
        contents = Contents(tmp_path / f"step-{step}", manifest)
        for name, tensor in whole(SHAPES, "weights", 1).items():
            assert torch.equal(contents.tensor(Key("weights", name)), tensor if seed else torch.zeros_like(tensor))


def save_with_a_full_disk_on_rank_1(here: RankContext, folder: Path) -> str:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here.mesh.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    checkpointer = Checkpointer(folder, 2, here.groups["world"], {})
    try:
        checkpointer.save(9, shards(here, SHAPES, True), {})
        checkpointer.wait()
    except RunError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        checkpointer.close()
    return "committed"


def test_full_disk_of_one_rank_is_one_line_on_all_and_the_checkpoint_before_stays(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(MeshShape(data=2), save, tmp_path, SHAPES, True, [3])
    said = ranks.run(MeshShape(data=2), save_with_a_full_disk_on_rank_1, tmp_path)
    assert said[0] == said[1] and "step 9 is not committed (write): rank 1: no space left" in said[0] and "\n" not in said[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
    assert all(answer["equal"] for answer in ranks.run(MeshShape(data=2), load, tmp_path, SHAPES, True))


def test_tensor_that_is_not_there_or_of_another_shape_is_one_line_and_nothing_is_filled(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(MeshShape(data=2), save, tmp_path, SHAPES, True, [1])
    contents = Contents(tmp_path / "step-1", verify(tmp_path / "step-1")[0])
    good = Shard(Key("weights", "model.norm.weight"), (32,), whole_offsets((32,)), torch.zeros(32, dtype=torch.bfloat16))
    for name, shape, dtype, said in (
        ("model.nothing", (3,), torch.bfloat16, "has no 'weights/model.nothing'"),
        ("lm_head.weight", (60, 32), torch.bfloat16, r"\[61, 32\]; expected torch.bfloat16 \[60, 32\]"),
        ("lm_head.weight", (61, 32), torch.float32, "torch.float32"),
    ):
        with pytest.raises(UserError, match=said):
            contents.read([good, Shard(Key("weights", name), shape, whole_offsets(shape), torch.zeros(shape, dtype=dtype))])
        assert not good.tensor.any()


def test_manifest_says_in_plain_text_what_is_there(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(MeshShape(data=2, tensor=2), save, tmp_path, SHAPES, True, [7])
    content = json.loads((tmp_path / "step-7" / "MANIFEST.json").read_text())
    assert content["step"] == 7 and content["mesh"] == {"data": 2, "tensor": 2} and content["state"] == {"updates": 7}
    assert [entry[0] for entry in content["indexes"]] == [f"rank-{rank:05d}.json" for rank in range(4)]
