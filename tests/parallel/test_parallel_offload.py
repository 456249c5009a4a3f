"""Moments, weights, gradients and activations of ranks in files: every bit of the same ranks in memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from data_ranks import trained
from model_ranks import QWEN3, QWEN3_MOE, Case
from pipeline_ranks import piped
from ranks import Here, Ranks

from tandem.layout.mesh import MeshShape
from tandem.trainer import pager, saved_pages

MOMENTS = ("offload",)
ACTIVATIONS = ("offload_activations",)
ALL = ("offload", "offload_parameters", "offload_activations")
CASE = Case(QWEN3, "float32", "cpu")
FOUR = MeshShape(data=2, tensor=2)


def pieces_of(here: Here, piece: int, smallest: int) -> None:
    """Small models in many pieces, on this rank."""
    pager.PIECE, saved_pages.SMALLEST_BYTES = piece, smallest


@pytest.fixture(autouse=True)
def small_pieces(ranks: Ranks, one_thread: None) -> Iterator[None]:
    before = pager.PIECE, saved_pages.SMALLEST_BYTES
    ranks.run(FOUR, pieces_of, 192, 64)
    yield
    ranks.run(FOUR, pieces_of, *before)


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
    check(ranks, MeshShape(data=2), CASE, zero, 1, tmp_path, MOMENTS)


def test_a_rank_pages_its_part_of_weights_and_of_gradients_of_several_passes(ranks: Ranks, tmp_path: Path) -> None:
    check(ranks, MeshShape(data=3), CASE, 3, 2, tmp_path, ("offload", "offload_parameters"))
    check(ranks, MeshShape(data=2), Case(QWEN3_MOE, "float32", "cpu", recompute="full"), 3, 2, tmp_path, ALL)


def test_files_stand_beside_tensor_expert_and_context_parallelism(ranks: Ranks, tmp_path: Path) -> None:
    check(ranks, FOUR, Case(QWEN3, "float32", "cpu", sequence=True), 3, 2, tmp_path, ALL)
    check(ranks, MeshShape(data=2, expert=2), Case(QWEN3_MOE, "float32", "cpu"), 3, 1, tmp_path, ALL)
    check(ranks, MeshShape(context=2, tensor=2), CASE, 0, 1, tmp_path, ("offload", *ACTIVATIONS))


BINS = ((0, 1), (2,), (3, 4), (5, 6))


def test_stages_of_a_pipeline_keep_the_activations_of_all_passes_that_wait(ranks: Ranks, tmp_path: Path) -> None:
    shape = MeshShape(pipeline=2)
    wanted = ranks.run(shape, piped, CASE, BINS)
    found = ranks.run(shape, piped, CASE, BINS, "1f1b", 1, (), tmp_path)
    for rank, other in zip(found, wanted, strict=True):
        assert (rank["losses"], rank["norms"], rank["stash"]) == (other["losses"], other["norms"], other["stash"])
        for kind in ("gradients", "parameters"):
            assert all(torch.equal(rank[kind][name], tensor) for name, tensor in other[kind].items())
        assert rank["offloaded"] > 10_000
    assert [rank["stash"] for rank in found] == [2, 1] and list(tmp_path.iterdir()) == []
