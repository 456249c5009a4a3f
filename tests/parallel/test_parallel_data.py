"""Data parallelism and ZeRO against one process, and against each other bit for bit."""

from typing import Any

import pytest
import torch
from model_ranks import (
    LEARNING_RATE,
    LLAMA,
    QWEN3,
    QWEN3_MOE,
    Case,
    Trained,
    build,
    by_one,
    by_sequence,
    check,
    ranks_of,
    sequences_of,
    whole,
)
from ranks import Here, Ranks

from tandem.config.trainer import TrainerConfig
from tandem.layout.mesh import MeshShape
from tandem.rl.algorithms.aggregate import counts_of
from tandem.rl.algorithms.cross_entropy import make_cross_entropy_loss
from tandem.trainer.micro_batch import blank, collate
from tandem.trainer.parallel.data import GradientSums
from tandem.trainer.parallel.replica import make_replica
from tandem.trainer.step import train_step

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(here: Here, case: Case, zero: Any, passes: int = 1) -> Trained:
    """``case`` through ``train_step`` on this rank: its sequences in ``passes`` micro-batches."""
    torch.set_num_threads(1)
    model = build(case, here)
    replica = make_replica(model, TrainerConfig(learning_rate=LEARNING_RATE, dtype=case.dtype, weight_decay=0.01), ranks_of(here, case), zero)
    every, dtype = sequences_of(case), getattr(torch, case.dtype)
    own = list(range(len(every)))[here.groups["data"].rank :: here.groups["data"].size]
    micro_batches = [collate([every[i] for i in own[nth::passes]], dtype) if own[nth::passes] else blank(dtype) for nth in range(passes)]
    loss = make_cross_entropy_loss(counts_of(every))
    logits, logprobs = by_sequence(model, collate([every[i] for i in own], dtype), own, case)
    replica.rest()
    result = Trained(logits, logprobs, [], [], {}, {})
    for step in range(case.steps):
        seen: dict[str, Any] = {}
        if step == 0:
            assert replica.sums is not None
            seen = remember(replica.sums)
        found = train_step(model, replica.optimizer, micro_batches, loss, LEARNING_RATE, sums=replica.sums)
        result.losses.append(found.metrics["sft/loss"])
        result.norms.append(found.metrics["actor/grad_norm"])
        if step == 0:
            with replica.whole():
                result.gradients = whole(model, seen, here.groups)
    with replica.whole():
        result.parameters = whole(model, dict(model.named_parameters()), here.groups)
    return result


def remember(sums: GradientSums) -> dict[str, torch.Tensor]:
    """Filled, before the first clipping, with the whole sums of every parameter."""
    found: dict[str, torch.Tensor] = {}
    norm = sums.norm

    def keep(scale: float = 1.0) -> float:
        if not found:
            for bucket, own in zip(sums.buckets, sums.own, strict=True):
                assert own is not None
                found.update({n: v.clone() for n, v in bucket.views(bucket.ranks.all_gather(own, "a test").view(-1)).items()})
        return norm(scale)

    sums.norm = keep  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("data", [2, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_ranks_equal_one_process_with_uneven_tokens(zero: int, data: int, ranks: Ranks) -> None:
    case = Case(QWEN3)
    check(ranks.run(MeshShape(data=data), trained, case, zero), by_one(case))


@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_equal_one_process_in_fp32_and_with_untied_weights(zero: int, ranks: Ranks) -> None:
    case = Case(LLAMA, "float32", "cpu")
    check(ranks.run(MeshShape(data=2), trained, case, zero), by_one(case))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_several_backward_passes_of_which_some_ranks_have_fewer(zero: int, ranks: Ranks) -> None:
    case = Case(QWEN3, lengths=(9, 2, 17))
    check(ranks.run(MeshShape(data=2), trained, case, zero, 2), by_one(case))


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_weights_gathered_for_a_layer_are_there_again_when_it_is_recomputed(recompute: Any, ranks: Ranks) -> None:
    case = Case(QWEN3, recompute=recompute)
    check(ranks.run(MeshShape(data=2), trained, case, 3), by_one(case))


def test_experts_are_replicas_too(ranks: Ranks) -> None:
    case = Case(QWEN3_MOE)
    check(ranks.run(MeshShape(data=2), trained, case, 3), by_one(case))


def test_zero_stands_beside_tensor_and_expert_parallelism(ranks: Ranks) -> None:
    case = Case(QWEN3, sequence=True)
    check(ranks.run(MeshShape(data=2, tensor=2), trained, case, 2), by_one(case))
    case = Case(QWEN3_MOE)
    check(ranks.run(MeshShape(data=2, expert=2), trained, case, 1), by_one(case))


def test_every_stage_has_the_bits_of_every_other(ranks: Ranks) -> None:
    case = Case(QWEN3, "float32", "cpu")
    wanted = ranks.run(MeshShape(data=3), trained, case, 0)
    for zero in (1, 2, 3):
        for rank, other in zip(ranks.run(MeshShape(data=3), trained, case, zero), wanted, strict=True):
            assert (rank.losses, rank.norms) == (other.losses, other.norms)
            assert all(torch.equal(rank.parameters[name], other.parameters[name]) for name in other.parameters)
