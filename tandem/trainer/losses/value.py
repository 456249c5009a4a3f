"""The clipped value loss of a critic (Schulman et al., 2016, "High-dimensional continuous control using generalized advantage estimation", and the clip of
OpenAI's baselines, as in TRL's ``PPOTrainer`` and verl's ``compute_value_loss``)."""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.config.algorithm import LossAggMode
from tandem.model.head_outputs import HeadOutputs
from tandem.trainer.losses.aggregate import GlobalCounts, row_weights, weighted_sum
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.step import Loss, LossShare


class ValueLoss(NamedTuple):
    """Per row: ``values[R]`` to be aggregated (with gradient), ``clipped[R]`` 1.0 where the clip is active, which carries no gradient."""

    values: Tensor
    clipped: Tensor


def value_loss(predicted: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> ValueLoss:
    """Returns ``1/2 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)`` of each row [R]; without a clip the first term alone.
    ``predicted`` carries gradient, ``old`` and ``returns`` do not."""
    squared = (predicted - returns).square()
    if clip is None:
        return ValueLoss(0.5 * squared, torch.zeros_like(squared).detach())
    bounded = (torch.minimum(torch.maximum(predicted, old - clip), old + clip) - returns).square()
    return ValueLoss(0.5 * torch.maximum(squared, bounded), (bounded > squared).detach().to(squared.dtype))


def make_value_loss(clip: float | None, loss_agg_mode: LossAggMode, counts: GlobalCounts) -> Loss:
    """Returns the aggregated value loss as shares of micro-batches. ``counts``: of the global batch of the optimizer step."""

    def loss(outputs: HeadOutputs, rows: MicroBatch) -> LossShare:
        found = value_loss(outputs.values, rows.values, rows.returns, clip)
        weights = row_weights(loss_agg_mode, rows.mask, rows.sequence_of_row, rows.sequence_mask_sums, counts)
        by_token = row_weights("token-mean", rows.mask, rows.sequence_of_row, rows.sequence_mask_sums, counts)
        total = weighted_sum(found.values, weights)
        return LossShare(total, {"critic/vf_loss": total.detach(), "critic/vf_clipfrac": weighted_sum(found.clipped, by_token)}, {})

    return loss


def with_value_loss(policy: Loss, value: Loss, coef: float) -> Loss:
    """Returns the loss of a model that is actor and critic: that of ``policy`` plus ``coef`` times that of ``value``."""

    def loss(outputs: HeadOutputs, rows: MicroBatch) -> LossShare:
        one, two = policy(outputs, rows), value(outputs, rows)
        return LossShare(one.loss + coef * two.loss, one.sums | two.sums, one.maxima | two.maxima)

    return loss
