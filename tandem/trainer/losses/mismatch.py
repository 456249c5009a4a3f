"""Measures how far the trainer's log-probabilities differ from those recorded by the rollout engine: exactly 0 if the bits are equal."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.reference_dtype import compute_dtype
from tandem.trainer.losses.aggregate import weighted_sum
from tandem.trainer.losses.kl import LOG_RATIO_LIMIT
from tandem.trainer.micro_batch import MicroBatch, counted_indices
from tandem.types import TrainSequence


class Mismatch(NamedTuple):
    """Mismatch over a set of tokens: ``k3_sum`` (nats), the sum of ``mismatch_k3``, and ``max_abs`` (nats), the largest absolute
    difference."""

    k3_sum: float = 0.0
    max_abs: float = 0.0


def mismatch_k3(trainer_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Returns k3 of KL(rollout || trainer) for each token [R] in float64, without gradient (Schulman, 2020).

    The rollout drew the tokens: with D = log trainer - log rollout, clamped to +-20, the estimate is exp(D) - 1 - D."""
    difference = (trainer_logprobs.detach().double() - rollout_logprobs.double()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(difference) - difference


def mismatch_shares(logprobs: Tensor, rows: MicroBatch, tokens: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns a micro-batch's share of ``mismatch_kl``, a mean over ``tokens`` tokens, and its ``mismatch_max_abs``: sums and maxima.
    ``logprobs[R]``: raw, of the trainer. Rows that are off-policy are not compared."""
    compared = rows.mask.double() if rows.off_policy is None else rows.mask.double() * ~rows.off_policy
    total = weighted_sum(mismatch_k3(logprobs, rows.rollout_logprobs), compared / tokens)
    distance = torch.where(compared > 0, (logprobs.detach().double() - rows.rollout_logprobs.double()).abs(), 0.0)
    # A rank without data passes a micro-batch without rows.
    return {"mismatch_kl": total}, {"mismatch_max_abs": distance.max() if len(distance) else distance.sum()}


def recorded_mismatch(sequences: Sequence[TrainSequence], logprobs: Sequence[Tensor], dtype: torch.dtype) -> Mismatch:
    """Compares the trainer's raw ``logprobs`` (float64 [n] a sequence, its counted tokens in order) with ``rollout_logprobs``, rounded to
    the log-probabilities of a model of ``dtype``, as in a micro-batch. Sequences without recorded log-probabilities, and tokens that other
    weights sampled (``off_policy``), are left out."""
    pairs = [(s, values) for s, values in zip(sequences, logprobs, strict=True) if s.rollout_logprobs]
    known, computed = list[float](), list[Tensor]()
    for sequence, values in pairs:
        indices = counted_indices(sequence)
        places = [place for place, i in enumerate(indices) if not (sequence.off_policy and sequence.off_policy[i])]
        known += [sequence.rollout_logprobs[indices[place]] for place in places]
        computed.append(values if len(places) == len(indices) else values[torch.tensor(places, dtype=torch.int64)])
    if not known:
        return Mismatch()
    recorded = torch.tensor(known, dtype=torch.float64)
    recorded = recorded.to(compute_dtype(dtype)).double()
    trainer = torch.cat(computed)
    return Mismatch(mismatch_k3(trainer, recorded).sum().item(), (trainer - recorded).abs().max().item())
