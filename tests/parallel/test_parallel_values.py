"""A value model on the ranks of any mesh computes the values, the gradients and the updates of one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from model_ranks import LLAMA, QWEN3, QWEN3_MOE, Case
from policy_ranks import Policy
from ranks import Ranks
from test_parallel_policy import check
from value_ranks import train_values, values_by_one_process

from tandem.layout.mesh import MeshShape

FULL = pytest.mark.full
pytestmark = pytest.mark.usefixtures("one_thread")
SEQUENCE = Case(replace(QWEN3, tie_word_embeddings=False, value_head="sequence", language_head=False))
TOKEN = Case(replace(LLAMA, value_head="token", language_head=False))
BESIDE = Case(replace(QWEN3, value_head="token"))
MIXTURE = Case(replace(QWEN3_MOE, value_head="token", language_head=False))
ROWS = {
    "tensor 2 with sequence parallelism": (MeshShape(tensor=2), replace(TOKEN, sequence=True)),
    "pipeline 2": (MeshShape(pipeline=2), SEQUENCE),
}
SLOW = {
    "data 2, zero 3": (MeshShape(data=2), replace(TOKEN, zero=3)),
    "context 2": (MeshShape(context=2), TOKEN),
    "data 2, zero 1": (MeshShape(data=2), replace(SEQUENCE, zero=1)),
    "tensor 2, deterministic": (MeshShape(tensor=2), replace(SEQUENCE, deterministic=True)),
    "tensor 2, deterministic, with sequence parallelism": (MeshShape(tensor=2), replace(TOKEN, deterministic=True, sequence=True)),
    "beside a tied head, pipeline 2": (MeshShape(pipeline=2), BESIDE),
    "beside a tied head, tensor 2": (MeshShape(tensor=2), replace(BESIDE, sequence=True)),
    "data 2, expert 2": (MeshShape(data=2, expert=2), MIXTURE),
    "tensor 2 x context 2": (MeshShape(tensor=2, context=2), replace(TOKEN, sequence=True)),
    "data 2 x pipeline 2, zero 3": (MeshShape(data=2, pipeline=2), replace(SEQUENCE, zero=3)),
    "data 2 x tensor 2 x pipeline 2": (MeshShape(data=2, tensor=2, pipeline=2), replace(TOKEN, sequence=True)),
}


def rows(some: dict[str, Any], *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(*row, id=name, marks=marks) for name, row in some.items()]


@pytest.mark.parametrize(("mesh", "case"), rows(ROWS) + rows(SLOW, FULL))
def test_ranks_of_a_value_model_take_the_updates_of_one_process(ranks: Ranks, mesh: MeshShape, case: Case) -> None:
    policy = Policy(case)
    check(ranks.run(mesh, train_values, policy), values_by_one_process(policy), policy)


def test_deterministic_tensor_ranks_give_the_bits_of_one_process(ranks: Ranks) -> None:
    policy = Policy(replace(TOKEN, dtype="float32", kernels="cpu", deterministic=True, steps=1))
    wanted = values_by_one_process(policy)
    for rank in ranks.run(MeshShape(tensor=2), train_values, policy):
        assert all(torch.equal(a, b) for a, b in zip(rank["logprobs"], wanted["logprobs"], strict=True))
