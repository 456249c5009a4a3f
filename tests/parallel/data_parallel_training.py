"""Trains a seeded model on a seeded batch with data-parallel ranks under any stage of ZeRO, with the gradient reduction of training."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from model_ranks import LEARNING_RATE, Case, Trained, build, by_sequence, ranks_of, sequences_of, whole
from ranks import RankContext

from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.cross_entropy import make_cross_entropy_loss
from tandem.trainer.micro_batch import blank, collate
from tandem.trainer.offload.activations import ActivationOffload
from tandem.trainer.parallel.gradient_reducer import GradientReducer
from tandem.trainer.parallel.replica import make_replica
from tandem.trainer.step import train_step


def trained(here: RankContext, case: Case, zero: Any, passes: int = 1, folder: Path | None = None, offloaded: Sequence[str] = ()) -> Trained:
    """Trains ``case`` with ``train_step`` on this rank, its sequences in ``passes`` micro-batches. ``offloaded``: keys of section ``trainer`` to
    set to ``nvme``, with files in ``folder``."""
    torch.set_num_threads(1)
    model = build(case, here)
    config = replace(case.trainer, **dict.fromkeys(offloaded, "nvme"))
    replica = make_replica(model, config, ranks_of(here, case), zero, directory=folder)
    assert (replica.paged is not None, replica.pages_weights) == ("offload" in offloaded, "offload_parameters" in offloaded)
    if folder is not None and "offload_activations" in offloaded:
        ActivationOffload(model, folder, 0, in_flight_bytes=1 << 12)
    every, dtype = sequences_of(case), getattr(torch, case.dtype)
    own = list(range(len(every)))[here.groups["data"].rank :: here.groups["data"].size]
    micro_batches = [collate([every[i] for i in own[nth::passes]], dtype) if own[nth::passes] else blank(dtype) for nth in range(passes)]
    loss = make_cross_entropy_loss(counts_of(every))
    logits, logprobs = by_sequence(model, collate([every[i] for i in own], dtype), own, case)
    replica.reshard()
    result = Trained(logits, logprobs, [], [], {}, {})
    for step in range(case.steps):
        seen: dict[str, Any] = {}
        if step == 0:
            assert replica.sums is not None
            seen = record_gradients(replica.sums)
        found = train_step(model, replica.optimizer, micro_batches, loss, LEARNING_RATE, sums=replica.sums)
        result.losses.append(found.metrics["sft/loss"])
        result.norms.append(found.metrics["actor/grad_norm"])
        if step == 0:
            with replica.whole():
                result.gradients = whole(model, seen, here.groups)
    with replica.whole():
        result.parameters = whole(model, dict(model.named_parameters()), here.groups)
    return result


def record_gradients(sums: GradientReducer) -> dict[str, torch.Tensor]:
    """Returns a mapping that is filled with the whole reduced gradients by name before the first clipping."""
    found: dict[str, torch.Tensor] = {}
    norm = sums.norm

    def keep(scale: float = 1.0) -> float:
        if not found:
            for bucket, own in zip(sums.buckets, sums.parts(), strict=True):
                found.update({n: v.clone() for n, v in bucket.views(bucket.ranks.all_gather(own, "a test").view(-1)).items()})
        return norm(scale)

    sums.norm = keep  # type: ignore[method-assign]
    return found
