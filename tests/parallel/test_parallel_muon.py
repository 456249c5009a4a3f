"""Muon with sharded matrices, experts and states takes the updates of one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from data_parallel_training import trained as trained_by_zero
from model_ranks import DEEPSEEK_V3, QWEN3, QWEN3_MOE, QWEN3_NEXT, Case, Trained, by_one_process, check, train
from ranks import RankContext, Ranks

from tandem.layout.mesh import MeshShape

FULL = pytest.mark.full
pytestmark = pytest.mark.usefixtures("one_thread")
DENSE, MIXTURE = Case(QWEN3, optimizer="muon"), Case(QWEN3_MOE, optimizer="muon")


def trained(here: RankContext, case: Case) -> Trained:
    return train(here, case)


@pytest.mark.parametrize(
    ("shape", "case"),
    [
        (MeshShape(tensor=2), DENSE),
        (MeshShape(tensor=2), replace(DENSE, deterministic=True, sequence=True)),
        (MeshShape(tensor=2), MIXTURE),
        pytest.param(MeshShape(tensor=2), replace(MIXTURE, deterministic=True), marks=FULL),
        (MeshShape(data=2, expert=2), MIXTURE),
        pytest.param(MeshShape(data=2, tensor=2, expert=2), replace(MIXTURE, sequence=True), marks=FULL),
        pytest.param(MeshShape(tensor=2), Case(DEEPSEEK_V3, optimizer="muon"), marks=FULL),
        pytest.param(MeshShape(tensor=2), Case(DEEPSEEK_V3, optimizer="muon", deterministic=True, sequence=True), marks=FULL),
        pytest.param(MeshShape(tensor=2), Case(QWEN3_NEXT, optimizer="muon"), marks=FULL),
        pytest.param(MeshShape(tensor=2), Case(QWEN3_NEXT, optimizer="muon", deterministic=True, sequence=True), marks=FULL),
    ],
    ids=[
        "tensor", "deterministic", "tensor of a mixture", "deterministic of a mixture", "expert", "tensor and expert", "latent", "deterministic of latent",
        "linear attention", "deterministic of linear attention",
    ],
)
def test_ranks_that_cut_matrices_orthogonalise_the_whole_ones(ranks: Ranks, shape: MeshShape, case: Case) -> None:
    """Queries, keys and values have different numbers of rows, and are interleaved by rank."""
    check(ranks.run(shape, trained, case), by_one_process(case))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_every_stage_of_zero_has_the_bits_of_stage_0(zero: Any, ranks: Ranks) -> None:
    """With three ranks, shards end within matrices and some ranks have nothing of one."""
    case = replace(DENSE, dtype="float32", kernels="cpu")
    wanted = stage_0(ranks, case)
    for rank, other in zip(ranks.run(MeshShape(data=3), trained_by_zero, case, zero), wanted, strict=True):
        assert (rank.losses, rank.norms) == (other.losses, other.norms)
        assert all(torch.equal(rank.parameters[name], other.parameters[name]) for name in other.parameters)


_stage_0: dict[Case, list[Trained]] = {}


def stage_0(ranks: Ranks, case: Case) -> list[Trained]:
    """Returns the results of three data-parallel ranks without sharding, computed once."""
    if case not in _stage_0:
        _stage_0[case] = ranks.run(MeshShape(data=3), trained_by_zero, case, 0)
    return _stage_0[case]


@pytest.mark.parametrize(
    ("shape", "case", "zero"),
    [
        (MeshShape(data=2, tensor=2), replace(DENSE, sequence=True), 2),
        pytest.param(MeshShape(data=2, tensor=2), replace(DENSE, recompute="full"), 3, marks=FULL),
        (MeshShape(data=2, expert=2), MIXTURE, 1),
        pytest.param(MeshShape(data=4, expert=2), MIXTURE, 3, marks=FULL),
    ],
    ids=["tensor, 2", "tensor, 3", "expert, 1", "expert, 3"],
)
def test_cut_states_of_cut_matrices_have_the_updates_of_one_process(shape: MeshShape, case: Case, zero: Any, ranks: Ranks) -> None:
    check(ranks.run(shape, trained_by_zero, case, zero), by_one_process(case))
