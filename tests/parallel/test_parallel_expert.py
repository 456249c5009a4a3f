"""Expert parallelism: ranks that divide the experts of a layer train like one process."""

from dataclasses import replace

import pytest
import torch
from model_ranks import DEEPSEEK_V3, GLM4_MOE, GPT_OSS, QWEN2_MOE, QWEN3_MOE, QWEN3_NEXT, Case, Trained, by_one_process, check, train
from ranks import RankContext, Ranks

from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.mesh import MeshShape

pytestmark = pytest.mark.usefixtures("one_thread")
MANY = replace(QWEN3_MOE, experts=ExpertShapes(16, 1, 24))


def trained(here: RankContext, case: Case) -> Trained:
    return train(here, case)


@pytest.mark.parametrize(
    ("shape", "case"),
    [
        (MeshShape(data=2, expert=2), Case(QWEN3_MOE)),
        (MeshShape(context=2, expert=2), Case(QWEN3_MOE)),
        pytest.param(MeshShape(data=2, context=2, expert=2), Case(QWEN3_MOE), marks=pytest.mark.full),
        pytest.param(MeshShape(data=2, tensor=2, expert=2), Case(QWEN2_MOE, sequence=True), marks=pytest.mark.full),
        pytest.param(MeshShape(data=2, expert=2), Case(GLM4_MOE, recompute="full"), marks=pytest.mark.full),
        pytest.param(MeshShape(data=2, tensor=2, expert=2), Case(GPT_OSS, sequence=True, recompute="selective"), marks=pytest.mark.full),
        pytest.param(MeshShape(data=2, tensor=2, expert=2), Case(DEEPSEEK_V3, sequence=True, recompute="selective"), marks=pytest.mark.full),
        pytest.param(MeshShape(data=2, tensor=2, expert=2), Case(QWEN3_MOE, sequence=True), marks=pytest.mark.full),
        pytest.param(MeshShape(data=2, expert=2), Case(QWEN3_NEXT), marks=pytest.mark.full),
        pytest.param(MeshShape(data=2, tensor=2, expert=2), Case(QWEN3_NEXT, sequence=True, recompute="full"), marks=pytest.mark.full),
    ],
    ids=[
        "data", "context", "data of context", "tensor with shared experts", "sigmoid scores", "biases and sinks", "latent attention", "tensor",
        "linear attention", "linear attention and tensor",
    ],
)
def test_ranks_that_divide_experts_train_what_one_process_trains(ranks: Ranks, shape, case) -> None:
    check(ranks.run(shape, trained, case), by_one_process(case))


@pytest.mark.parametrize(
    ("shape", "recompute"),
    [(MeshShape(data=2, expert=2), "none"), pytest.param(MeshShape(context=2, tensor=2), "full", marks=pytest.mark.full)],
    ids=["data", "context"],
)
def test_balancing_sees_the_tokens_of_all_ranks(ranks: Ranks, shape, recompute) -> None:
    case = Case(QWEN3_MOE, balance_loss=0.05, bias_rate=0.01, recompute=recompute, sequence=shape.tensor > 1)
    wanted = by_one_process(case)
    check(ranks.run(shape, trained, case), wanted)
    assert any(bias.abs().max() > 0.005 for bias in wanted.biases.values())


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.full)])
def test_experts_and_ranks_without_a_token_take_part(ranks: Ranks, count) -> None:
    """One token goes to one expert of 16; only the last rank has a token."""
    case = Case(MANY, lengths=(2,), masked=3)
    check(ranks.run(MeshShape(context=count, expert=count), trained, case), by_one_process(case))


def test_divided_experts_have_the_bits_of_one_process(ranks: Ranks) -> None:
    case = Case(QWEN3_MOE, "float32", "cpu", steps=1)
    found, wanted = ranks.run(MeshShape(context=2, expert=2), trained, case), by_one_process(case)
    check(found, wanted)
    assert all(torch.equal(rank.logits[i], wanted.logits[i]) for rank in found for i in wanted.logits)
