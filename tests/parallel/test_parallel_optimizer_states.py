"""Sharded states of Muon and 8-bit AdamW: the bits of one process, and saved on one mesh and read on another."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_ranks import LEARNING_RATE, QWEN3, QWEN3_MOE, Case, Trained, build, distance, ranks_of, sequences_of, train, whole
from ranks import RankContext, Ranks

from tandem.layout.mesh import MeshShape
from tandem.trainer.checkpoint.checkpointer import Checkpointer
from tandem.trainer.checkpoint.find import newest_whole
from tandem.trainer.checkpoint.format.manifest import verify
from tandem.trainer.checkpoint.read import Contents
from tandem.trainer.checkpoint.replica_state import ReplicaState
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.cross_entropy import make_cross_entropy_loss
from tandem.trainer.micro_batch import collate
from tandem.trainer.optimizers.blockwise import BLOCK, dynamic_values
from tandem.trainer.parallel.gradient_reducer import ReplicatedOptimizer
from tandem.trainer.parallel.replica import Replica, make_replica
from tandem.trainer.step import train_step
from tandem.types import UserError

FULL = pytest.mark.full
pytestmark = pytest.mark.usefixtures("one_thread")
DENSE = Case(replace(QWEN3, hidden_size=96, intermediate_size=160), "float32", optimizer="adamw8bit")
MIXTURE = Case(replace(QWEN3_MOE, hidden_size=96), "float32", optimizer="adamw8bit")
MUON = Case(QWEN3, optimizer="muon")
ALONE, TENSOR, BOTH, EXPERT = MeshShape(), MeshShape(tensor=2), MeshShape(data=2, tensor=2), MeshShape(data=2, expert=2)


Tensors = dict[str, torch.Tensor]
Run = tuple[Tensors, dict[str, Tensors], dict[str, Tensors]]
"""Parameters after the last step; AdamW's moments before it, decoded; the scales of each number's block, 0 where none was coded. By Hugging
Face name, whole."""


def trained(here: RankContext, case: Case) -> Trained:
    return train(here, case)


def make(here: RankContext | None, case: Case) -> Replica:
    torch.set_num_threads(1)
    return make_replica(build(case, here), case.trainer, ranks_of(here, case), case.zero)


def step(here: RankContext | None, case: Case, replica: Replica) -> Tensors:
    """Takes one more step; returns the whole parameters after it."""
    data, every = ranks_of(here, case).data, sequences_of(case)
    own = [collate(every[data.rank :: data.size], getattr(torch, case.dtype))]
    train_step(replica.model, replica.optimizer, own, make_cross_entropy_loss(counts_of(every)), LEARNING_RATE, sums=replica.sums)
    with replica.whole():
        return whole(replica.model, dict(replica.model.named_parameters()), None if here is None else here.groups)


def save(here: RankContext | None, case: Case, folder: Path) -> Run:
    """Takes two steps, saves a checkpoint, and takes one more step."""
    replica, world = make(here, case), ranks_of(here, case).world
    for _ in range(2):
        step(here, case, replica)
    checkpointer = Checkpointer(folder, 1, world, {}, asynchronous=False)
    checkpointer.save(2, ReplicaState(replica).shards(), {"updates": replica.optimizer.updates})
    checkpointer.close()
    moments = whole_moments(here, replica)
    return step(here, case, replica), *moments


def go_on(here: RankContext | None, case: Case, folder: Path) -> Run:
    """Takes the third step from the checkpoint of ``save``."""
    replica = make(here, case)
    with replica.whole(changes=True), torch.no_grad():
        for parameter in replica.model.parameters():
            parameter.zero_()
    found = newest_whole(folder, ranks_of(here, case).world)
    assert found is not None
    ReplicaState(replica).load(Contents(found.folder, found.manifest), found.manifest.state["updates"])
    assert replica.optimizer.updates == 2
    moments = whole_moments(here, replica)
    return step(here, case, replica), *moments


def whole_moments(here: RankContext | None, replica: Replica) -> tuple[dict[str, Tensors], dict[str, Tensors]]:
    """Returns AdamW's moments and their blocks' scales without ZeRO."""
    inner = replica.optimizer.inner if isinstance(replica.optimizer, ReplicatedOptimizer) else replica.optimizer
    if replica.sums is not None and not isinstance(replica.optimizer, ReplicatedOptimizer):
        return {}, {}
    groups, held = None if here is None else here.groups, inner.state().moments
    moments, scales = {}, {}
    for kind in ("exp_avg", "exp_avg_sq"):
        values: Tensors = {}
        sizes: Tensors = {}
        for name, p in replica.model.named_parameters():
            if f"{kind}_codes/{name}" not in held:
                values[name], sizes[name] = held.get(f"{kind}/{name}", torch.zeros_like(p)), torch.zeros_like(p)
                continue
            scale = held[f"{kind}_scales/{name}"].repeat_interleave(BLOCK)[: p.numel()]
            values[name] = (dynamic_values(kind == "exp_avg")[held[f"{kind}_codes/{name}"].int()] * scale).view(p.shape)
            sizes[name] = scale.view(p.shape)
        moments[kind], scales[kind] = whole(replica.model, values, groups), whole(replica.model, sizes, groups)
    return moments, scales


def run(ranks: Ranks, shape: MeshShape, function: Any, case: Case, folder: Path) -> list[Run]:
    return [function(None, case, folder)] if shape.world == 1 else ranks.run(shape, function, case, folder)


def is_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def files_are_equal(folder: Path, other: Path) -> bool:
    ours, theirs = (Contents(path / "step-2", verify(path / "step-2")[0]) for path in (folder, other))
    return ours.held == theirs.held and all(torch.equal(ours.tensor(key), theirs.tensor(key)) for key in theirs.held)


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=FULL), 3])
def test_codes_that_zero_cuts_are_those_of_stage_0(zero: Any, ranks: Ranks, tmp_path: Path) -> None:
    """With three ranks, parts end within matrices."""
    shape = MeshShape(data=3)
    wanted, found = (run(ranks, shape, save, replace(DENSE, zero=stage), tmp_path / str(stage)) for stage in (0, zero))
    parameters, moments, _ = wanted[0]
    assert all(is_equal(rank[0], parameters) for rank in found)
    assert files_are_equal(tmp_path / str(zero), tmp_path / "0")
    contents = Contents(tmp_path / "0" / "step-2", verify(tmp_path / "0" / "step-2")[0])
    assert any(key.state == "exp_avg_sq_codes" for key in contents.held)
    _, loaded, _ = go_on(None, DENSE, tmp_path / str(zero))
    assert all(is_equal(loaded[kind], moments[kind]) for kind in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize(
    ("shape", "case"),
    [
        pytest.param(BOTH, replace(MUON, zero=3), marks=FULL),
        (BOTH, replace(DENSE, zero=2)),
        (EXPERT, replace(MIXTURE, zero=1)),
        pytest.param(EXPERT, replace(MIXTURE, zero=3, optimizer="muon"), marks=FULL),
        pytest.param(TENSOR, replace(DENSE, deterministic=True), marks=FULL),
    ],
    ids=["muon", "8 bits", "8 bits of experts", "muon of experts", "8 bits by outputs"],
)
def test_a_run_goes_on_bit_for_bit_on_its_own_mesh(shape: MeshShape, case: Case, ranks: Ranks, tmp_path: Path) -> None:
    wanted = run(ranks, shape, save, case, tmp_path)
    for found, other in zip(run(ranks, shape, go_on, case, tmp_path), wanted, strict=True):
        assert is_equal(found[0], other[0])


@pytest.mark.parametrize(
    ("shape", "case"),
    [
        (ALONE, MUON),
        pytest.param(MeshShape(data=3), replace(MUON, zero=1), marks=FULL),
        pytest.param(TENSOR, replace(MUON, deterministic=True), marks=FULL),
    ],
    ids=["one process", "other ranks", "another cut"],
)
def test_muon_goes_on_on_another_mesh(shape: MeshShape, case: Case, ranks: Ranks, tmp_path: Path) -> None:
    wanted = run(ranks, BOTH, save, replace(MUON, zero=2), tmp_path)
    for found in run(ranks, shape, go_on, case, tmp_path):
        assert distance(found[0], wanted[0][0]) < 1e-10


@pytest.mark.parametrize(
    ("writer", "written", "reader", "read"),
    [
        (TENSOR, DENSE, ALONE, DENSE),
        (ALONE, DENSE, TENSOR, replace(DENSE, deterministic=True)),
        pytest.param(TENSOR, DENSE, TENSOR, replace(DENSE, deterministic=True), marks=FULL),
        pytest.param(EXPERT, MIXTURE, TENSOR, MIXTURE, marks=FULL),
        pytest.param(TENSOR, MIXTURE, EXPERT, MIXTURE, marks=FULL),
        pytest.param(MeshShape(data=2, tensor=2, expert=2), MIXTURE, MeshShape(data=3, expert=3), MIXTURE, marks=FULL),
    ],
    ids=["tensor to one", "one to tensor", "to another cut", "expert to tensor", "tensor to expert", "both to three experts"],
)
def test_codes_of_cut_matrices_are_read_under_another_cut_within_a_blocks_rounding(
    writer: MeshShape, written: Case, reader: MeshShape, read: Case, ranks: Ranks, tmp_path: Path
) -> None:
    _, wanted, _ = run(ranks, writer, save, written, tmp_path)[0]
    for _, found, scales in run(ranks, reader, go_on, read, tmp_path):
        # Values are at most 0.9 / 64 of a block's largest apart, without a sign half of that; a value other than 0 stays so.
        for kind, share in (("exp_avg", 0.45 / 64), ("exp_avg_sq", 0.45 / 128)):
            for name, tensor in wanted[kind].items():
                assert ((found[kind][name] - tensor).abs() <= 1.02 * share * scales[kind][name]).all(), (kind, name)
            assert any(scale.any() for scale in scales[kind].values())


@pytest.mark.parametrize(("shape", "case"), [(TENSOR, DENSE), pytest.param(EXPERT, MIXTURE, marks=FULL)], ids=["tensor", "expert"])
def test_ranks_in_8_bits_are_as_near_to_one_process_as_8_bits_are_to_adamw(shape: MeshShape, case: Case, ranks: Ranks) -> None:
    """The blocks of a sharded matrix differ, so its moments are rounded differently."""
    wanted, plain = train(None, case).parameters, train(None, replace(case, optimizer="adamw")).parameters
    for rank in ranks.run(shape, trained, case):
        assert distance(rank.parameters, wanted) < distance(plain, wanted) < 0.01
    once = replace(case, steps=1)
    for rank in ranks.run(shape, trained, once):
        assert distance(rank.parameters, train(None, once).parameters) < 1e-5, "before the first step nothing is rounded"


@pytest.mark.parametrize("other", ["adamw", pytest.param("muon", marks=FULL)])
def test_state_of_another_optimizer_is_refused_in_one_line(other: Any, ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, ALONE, save, replace(DENSE, optimizer=other), tmp_path)
    for said in ranks.run(MeshShape(data=2), refused, replace(DENSE, zero=1), tmp_path):
        assert "is of another model or optimizer: it has" in said and "\n" not in said


def refused(here: RankContext, case: Case, folder: Path) -> str:
    try:
        go_on(here, case, folder)
    except UserError as error:
        return str(error)
    return "taken"
