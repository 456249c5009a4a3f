"""How far the trainer's log-probabilities are from those that the rollout engine recorded. Exactly 0 where both have the same bits."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.trainer.losses.kl import LOG_RATIO_LIMIT
from tandem.trainer.micro_batch import counted_indices
from tandem.types import TrainSequence


class Mismatch(NamedTuple):
    """Over some tokens: ``k3_sum`` (nats), the sum of ``mismatch_k3``, and ``max_abs`` (nats), the largest absolute difference."""

    k3_sum: float = 0.0
    max_abs: float = 0.0


def mismatch_k3(trainer_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Returns k3 of KL(rollout || trainer) for each token [R] in float64, without gradient (Schulman, 2020).

    The rollout drew the tokens: with D = log trainer - log rollout, clamped to +-20, the estimate is exp(D) - 1 - D."""
    difference = (trainer_logprobs.detach().double() - rollout_logprobs.double()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(difference) - difference


def recorded_mismatch(sequences: Sequence[TrainSequence], logprobs: Sequence[Tensor], dtype: torch.dtype) -> Mismatch:
    """Compares the trainer's raw ``logprobs`` (float64 [n] a sequence, its counted tokens in order) with ``rollout_logprobs``,
    rounded to ``dtype`` as a micro-batch rounds them. Sequences without a record are left out."""
    pairs = [(s, values) for s, values in zip(sequences, logprobs, strict=True) if s.rollout_logprobs]
    if not pairs:
        return Mismatch()
    recorded = torch.tensor([s.rollout_logprobs[i] for s, _ in pairs for i in counted_indices(s)], dtype=torch.float64).to(dtype).double()
    found = torch.cat([values for _, values in pairs])
    return Mismatch(mismatch_k3(found, recorded).sum().item(), (found - recorded).abs().max().item())
