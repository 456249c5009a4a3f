"""Tensor and sequence parallelism: ranks that share a model train what one process trains."""

from dataclasses import replace

import pytest
from model_ranks import LEARNING_RATE, LLAMA, QWEN3, QWEN3_MOE, Case, Trained, distance, train
from ranks import Here, Ranks

from tandem.layout.mesh import MeshShape


def trained(here: Here, case: Case) -> Trained:
    return train(here, case)


alone: dict[Case, Trained] = {}


def by_one(case: Case) -> Trained:
    """What one process has for ``case``, once."""
    plain = replace(case, deterministic=False, sequence=False)
    if plain not in alone:
        alone[plain] = train(None, plain)
    return alone[plain]


def check(found: list[Trained], wanted: Trained, float32: bool = False) -> None:
    close = 1e-6 if float32 else 1e-10
    for rank in found:
        assert distance(rank.logits, {i: wanted.logits[i] for i in rank.logits}) < close
        assert distance(rank.logprobs, {i: wanted.logprobs[i] for i in rank.logprobs}) < close
        assert rank.losses == pytest.approx(wanted.losses, rel=1e-5 if float32 else 1e-10)
        assert rank.norms == pytest.approx(wanted.norms, rel=1e-5 if float32 else 1e-10)
        assert distance(rank.gradients, wanted.gradients) < close
        if float32:
            furthest = max((rank.parameters[name] - wanted.parameters[name]).abs().max().item() for name in wanted.parameters)
            assert furthest < 0.1 * LEARNING_RATE
        else:
            assert distance(rank.parameters, wanted.parameters) < close
    assert {i for rank in found for i in rank.logits} == set(wanted.logits)


@pytest.mark.parametrize("shapes", [QWEN3, LLAMA, QWEN3_MOE], ids=lambda s: s.architecture)
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["summed", "deterministic"])
def test_two_tensor_ranks_train_what_one_process_trains(ranks: Ranks, shapes, sequence, deterministic) -> None:
    case = Case(shapes, deterministic=deterministic, sequence=sequence)
    check(ranks.run(MeshShape(tensor=2), trained, case), by_one(case))
