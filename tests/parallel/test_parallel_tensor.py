"""Tensor and sequence parallelism: ranks that share a model train what one process trains."""

from dataclasses import replace

import pytest
import torch
from model_ranks import LLAMA, QWEN3, QWEN3_MOE, Case, Trained, by_one, check, train
from ranks import Here, Ranks

from tandem.layout.mesh import MeshShape

FULL = pytest.mark.full
pytestmark = pytest.mark.usefixtures("one_thread")


def trained(here: Here, case: Case) -> Trained:
    return train(here, case)


FAST = {(LLAMA, False, False), (LLAMA, True, False), (LLAMA, True, True), (QWEN3, True, False), (QWEN3_MOE, False, True), (QWEN3_MOE, True, False)}
CASES = [
    pytest.param(Case(shapes, deterministic=deterministic, sequence=sequence), marks=[] if (shapes, sequence, deterministic) in FAST else FULL)
    for shapes in (QWEN3, LLAMA, QWEN3_MOE)
    for sequence in (False, True)
    for deterministic in (False, True)
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.shapes.architecture}{' sequence' * c.sequence}{' deterministic' * c.deterministic}")
def test_two_tensor_ranks_train_what_one_process_trains(ranks: Ranks, case) -> None:
    check(ranks.run(MeshShape(tensor=2), trained, case), by_one(case))


@pytest.mark.full
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
def test_tensor_ranks_in_fp32_at_a_temperature(ranks: Ranks, sequence) -> None:
    case = Case(replace(QWEN3, num_kv_heads=4), "float32", "cpu", sequence=sequence, temperature=0.7)
    check(ranks.run(MeshShape(tensor=4), trained, case), by_one(case))


@pytest.mark.parametrize("shapes", [LLAMA, QWEN3_MOE], ids=lambda s: s.architecture)
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
def test_a_deterministic_cut_has_the_bits_of_one_process(ranks: Ranks, shapes, sequence) -> None:
    case = Case(shapes, "float32", "cpu", deterministic=True, sequence=sequence, temperature=0.7, steps=1)
    found, wanted = ranks.run(MeshShape(tensor=2), trained, case), by_one(case)
    check(found, wanted)
    for rank in found:
        assert rank.losses == wanted.losses
        assert all(torch.equal(rank.logits[i], wanted.logits[i]) and torch.equal(rank.logprobs[i], wanted.logprobs[i]) for i in wanted.logits)


@pytest.mark.parametrize(("zero", "recompute"), [pytest.param(0, "none", marks=FULL), pytest.param(1, "selective", marks=FULL), (3, "full")])
def test_tensor_ranks_times_data_ranks(ranks: Ranks, zero, recompute) -> None:
    case = Case(QWEN3, sequence=True, zero=zero, recompute=recompute)
    check(ranks.run(MeshShape(data=2, tensor=2), trained, case), by_one(case))
