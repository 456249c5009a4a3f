"""Moments, weights, gradients and activations of ranks in files: all bits equal those of the same ranks in memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from data_parallel_training import trained
from model_ranks import LEARNING_RATE, QWEN3, QWEN3_MOE, Case, build, ranks_of, sequences_of
from pipeline_ranks import train_pipeline
from ranks import RankContext, Ranks, small_pieces

from tandem.config.trainer import TrainerConfig
from tandem.layout.mesh import MeshShape
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.cross_entropy import make_cross_entropy_loss
from tandem.trainer.micro_batch import collate
from tandem.trainer.optimizers.adamw import MOMENTS
from tandem.trainer.parallel.replica import Replica, make_replica
from tandem.trainer.parallel.zero import ShardedOptimizer
from tandem.trainer.step import train_step

ALL = ("offload", "offload_parameters", "offload_activations")
CASE = Case(QWEN3, "float32", "cpu")
FOUR = MeshShape(data=2, tensor=2)


@pytest.fixture(autouse=True)
def many_pieces(ranks: Ranks, one_thread: None) -> Iterator[None]:
    before = ranks.run(FOUR, small_pieces, 192, 64)[0]
    yield
    ranks.run(FOUR, small_pieces, *before)


def check(ranks: Ranks, shape: MeshShape, case: Case, zero: Any, passes: int, folder: Path, offloaded: tuple[str, ...]) -> None:
    wanted = ranks.run(shape, trained, case, zero, passes)
    for rank, other in zip(ranks.run(shape, trained, case, zero, passes, folder, offloaded), wanted, strict=True):
        assert (rank.losses, rank.norms) == (other.losses, other.norms)
        for found, held in ((rank.gradients, other.gradients), (rank.parameters, other.parameters)):
            assert found.keys() == held.keys() and all(torch.equal(found[name], held[name]) for name in held)
    assert max(rank.norms) > 1, "gradients are clipped"
    assert [path for path in folder.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_rank_pages_the_moments_of_what_it_updates(zero: int, ranks: Ranks, tmp_path: Path) -> None:
    check(ranks, MeshShape(data=2), CASE, zero, 1, tmp_path, ("offload",))


@pytest.mark.full
def test_a_rank_pages_its_part_of_weights_and_of_gradients_of_several_passes(ranks: Ranks, tmp_path: Path) -> None:
    check(ranks, MeshShape(data=3), CASE, 3, 2, tmp_path, ("offload", "offload_parameters"))
    check(ranks, MeshShape(data=2), Case(QWEN3_MOE, "float32", "cpu", recompute="full"), 3, 2, tmp_path, ALL)


@pytest.mark.full
def test_files_stand_beside_tensor_expert_and_context_parallelism(ranks: Ranks, tmp_path: Path) -> None:
    check(ranks, FOUR, Case(QWEN3, "float32", "cpu", sequence=True), 3, 2, tmp_path, ALL)
    check(ranks, MeshShape(data=2, expert=2), Case(QWEN3_MOE, "float32", "cpu"), 3, 1, tmp_path, ALL)
    check(ranks, MeshShape(context=2, tensor=2), CASE, 0, 1, tmp_path, ("offload", "offload_activations"))


def goes_on(here: RankContext, case: Case, zero: Any, folder: Path, offloaded: tuple[str, ...]) -> list[list[float]]:
    """Returns the losses and norms of two steps in memory and in files, each continuing from the other's state, by parts and by whole
    tensors."""
    torch.set_num_threads(1)
    every, dtype = sequences_of(case), getattr(torch, case.dtype)
    micro_batches = [collate(every[here.mesh.rank :: here.mesh.shape.world], dtype)]
    loss = make_cross_entropy_loss(counts_of(every))

    def made(keys: tuple[str, ...]) -> Replica:
        config = TrainerConfig(learning_rate=LEARNING_RATE, **dict.fromkeys(keys, "nvme"))
        return make_replica(build(case, here), config, ranks_of(here, case), zero, directory=folder)

    def step(replica: Replica) -> list[float]:
        metrics = train_step(replica.model, replica.optimizer, micro_batches, loss, LEARNING_RATE, sums=replica.sums).metrics
        return [metrics["sft/loss"], metrics["actor/grad_norm"]]

    plain, paged = made(()), made(offloaded)
    seen = [step(plain), step(paged)]
    for one, other in ((plain, paged), (paged, plain)):
        assert isinstance(one.optimizer, ShardedOptimizer) and isinstance(other.optimizer, ShardedOptimizer)
        step(one)
        other.optimizer.load_parts(one.optimizer.parts(), one.optimizer.updates)
        seen += [step(one), step(other)]
        state = one.optimizer.state()
        assert state.moments.keys() == {f"{run.kind}/{run.name}" for run in one.optimizer.parts(form=True) if run.kind in MOMENTS}
        other.optimizer.load_state(state)
        seen += [step(one), step(other)]
    return seen


@pytest.mark.parametrize(("zero", "offloaded"), [(1, ("offload",)), (3, ("offload", "offload_parameters"))])
def test_states_of_ranks_pass_between_memory_and_files(zero: int, offloaded: tuple[str, ...], ranks: Ranks, tmp_path: Path) -> None:
    for seen in ranks.run(MeshShape(data=2), goes_on, CASE, zero, tmp_path, offloaded):
        assert all(one == other for one, other in zip(seen[::2], seen[1::2], strict=True))
        assert len({tuple(each) for each in seen}) == 5, "every step is another"


BINS = ((0, 1), (2,), (3, 4), (5, 6))


def test_stages_of_a_pipeline_keep_the_activations_of_all_passes_that_wait(ranks: Ranks, tmp_path: Path) -> None:
    shape = MeshShape(pipeline=2)
    wanted = ranks.run(shape, train_pipeline, CASE, BINS)
    found = ranks.run(shape, train_pipeline, CASE, BINS, "1f1b", 1, (), tmp_path)
    for rank, other in zip(found, wanted, strict=True):
        assert (rank["losses"], rank["norms"], rank["stash"]) == (other["losses"], other["norms"], other["stash"])
        for kind in ("gradients", "parameters"):
            assert all(torch.equal(rank[kind][name], tensor) for name, tensor in other[kind].items())
        assert rank["offloaded"] > 10_000
    assert [rank["stash"] for rank in found] == [2, 1] and list(tmp_path.iterdir()) == []
