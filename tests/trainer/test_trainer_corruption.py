"""Which micro-batches are computed twice and by whom, and what follows from what was computed: against cases worked by hand."""

from collections import Counter
from dataclasses import fields

import pytest
import torch

from tandem.layout.mesh import MeshShape
from tandem.model.shared_prompts import SharedPrompts
from tandem.trainer.corruption.draws import computer_of, drawn, replicas_of
from tandem.trainer.corruption.exchange import decode, encode
from tandem.trainer.corruption.verdict import Computation, Verdict, judge
from tandem.trainer.micro_batch import MicroBatch, collate
from tandem.types import TrainSequence


def test_one_micro_batch_in_a_hundred_is_drawn_and_the_draw_depends_on_seed_and_step_alone() -> None:
    draws = [drawn(7, step, 0, 20, 0.01, 4) for step in range(5000)]
    assert 0.009 < sum(map(len, draws)) / 100_000 < 0.011
    assert draws == [drawn(7, step, 0, 20, 0.01, 4) for step in range(5000)] and draws != [drawn(8, step, 0, 20, 0.01, 4) for step in range(5000)]
    assert drawn(7, 3, 0, 20, 1.0, 2) == [(number, 1) for number in range(20)]
    assert drawn(7, 3, 0, 20, 0.0, 2) == drawn(7, 3, 0, 20, 1.0, 1) == []


def test_a_rank_with_fewer_micro_batches_draws_the_same_of_them() -> None:
    assert drawn(1, 5, 0, 300, 0.1, 3)[:10] == drawn(1, 5, 0, 1000, 0.1, 3)[:10]


def test_in_time_every_pair_of_replicas_meets_equally_often() -> None:
    shape = MeshShape(data=5)
    pairs = Counter[frozenset[int]]()
    for step in range(2000):
        for draw in drawn(3, step, 0, 1, 1.0, replicas_of(shape)):
            pairs.update(frozenset((rank, computer_of(shape, rank, draw.shift))) for rank in range(5))
    assert len(pairs) == 10 and min(pairs.values()) > 800 and all(len(pair) == 2 for pair in pairs)


@pytest.mark.parametrize(
    ("shape", "replicas", "computers"),
    [
        (MeshShape(data=2, tensor=2), 2, [2, 3, 0, 1]),
        (MeshShape(data=2, pipeline=2), 2, [1, 0, 3, 2]),
        # Ranks 0 and 1 share experts, as 2 and 3 do.
        (MeshShape(data=4, expert=2), 2, [2, 3, 0, 1]),
        (MeshShape(data=2, context=2, expert=2), 2, [2, 3, 0, 1]),
    ],
    ids=["tensor", "pipeline", "expert", "context and expert"],
)  # fmt: skip
def test_the_second_computer_has_the_same_place_in_another_replica(shape: MeshShape, replicas: int, computers: list[int]) -> None:
    assert replicas_of(shape) == replicas and [computer_of(shape, rank, 1) for rank in range(shape.world)] == computers


def test_experts_over_all_data_ranks_leave_no_second_replica() -> None:
    assert replicas_of(MeshShape(data=4, expert=4)) == 1


def first(rank: int, digest: str) -> Computation:
    return Computation(rank, digest, is_repeat=False)


def again(rank: int, digest: str) -> Computation:
    return Computation(rank, digest, is_repeat=True)


@pytest.mark.parametrize(
    ("computations", "verdict"),
    [
        ([first(0, "bad"), first(1, "x"), again(0, "x"), again(1, "x")], Verdict("x", (0,), ())),
        ([first(0, "x"), first(1, "bad"), again(0, "x"), again(1, "x")], Verdict("x", (1,), ())),
        ([first(0, "x"), first(1, "bad"), again(0, "x"), again(1, "worse")], Verdict("x", (1,), (1,))),
        ([first(0, "x"), first(1, "bad"), again(0, "x"), again(1, "bad")], Verdict(None, (0, 1), (0, 1))),
        ([first(0, "x"), first(1, "bad"), again(0, "x"), again(1, "bad"), again(2, "x")], Verdict("x", (1,), (1,))),
        ([first(0, "bad"), first(1, "x"), again(0, "bad"), again(1, "x"), again(2, "x"), again(3, "x")], Verdict("x", (0,), (0,))),
    ],
    ids=["owner once", "second once", "second, never twice the same", "two ranks, each sure", "a third decides", "four ranks"],
)
def test_the_rank_that_differs_from_most_is_wrong(computations: list[Computation], verdict: Verdict) -> None:
    assert judge(computations) == verdict


def is_equal(one: object, other: object) -> bool:
    if isinstance(one, SharedPrompts) and isinstance(other, SharedPrompts):
        return all(map(torch.equal, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


@pytest.mark.parametrize("share_prompts", [False, True], ids=["apart", "shared prompts"])
def test_a_micro_batch_arrives_as_it_was_sent(share_prompts: bool) -> None:
    sequences = [
        TrainSequence(f"{n}", (5, 6, 7, 8 + n), 2, (0.0, 0.0, 1.0, 1.0), advantages=(0.0, 0.0, 0.1, -0.3 * n), off_policy=(False, False, True, False))
        for n in range(3)
    ]
    sent = collate(sequences, share_prompts=share_prompts)
    arrived = decode(encode(sent), torch.device("cpu"))
    assert (sent.prompts is not None) == share_prompts
    assert all(is_equal(getattr(sent, field.name), getattr(arrived, field.name)) for field in fields(MicroBatch))
