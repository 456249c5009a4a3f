"""One seeded model and batch trained by data-parallel ranks under any stage of ZeRO, through the sums that training takes."""

from typing import Any

import torch
from model_ranks import LEARNING_RATE, Case, Trained, build, by_sequence, ranks_of, sequences_of, whole
from ranks import Here

from tandem.rl.algorithms.aggregate import counts_of
from tandem.rl.algorithms.cross_entropy import make_cross_entropy_loss
from tandem.trainer.micro_batch import blank, collate
from tandem.trainer.parallel.data import GradientSums
from tandem.trainer.parallel.replica import make_replica
from tandem.trainer.step import train_step


def trained(here: Here, case: Case, zero: Any, passes: int = 1) -> Trained:
    """``case`` through ``train_step`` on this rank: its sequences in ``passes`` micro-batches."""
    torch.set_num_threads(1)
    model = build(case, here)
    replica = make_replica(model, case.trainer, ranks_of(here, case), zero)
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
