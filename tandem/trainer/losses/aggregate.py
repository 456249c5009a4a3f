"""Aggregates token losses to one number: the field's four modes, by verl's names.

Each is a sum over rows of ``weight * value`` with weights from *global* counts alone. The shares of micro-batches and ranks therefore add
up to the loss of the global batch, whatever the partition."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.config.algorithm import LossAggMode
from tandem.types import TrainSequence


@dataclass(frozen=True, slots=True)
class GlobalCounts:
    """Counts of the global batch of one optimizer step: ``tokens`` (sum of the loss mask), ``sequences`` that have a
    counted token, and ``length_constant`` (tokens) for ``seq-mean-token-sum-norm``."""

    tokens: float
    sequences: int
    length_constant: int = 1


def row_weights(
    loss_agg_mode: LossAggMode, mask: Tensor, sequence_of_row: Tensor, sequence_mask_sums: Tensor, counts: GlobalCounts
) -> Tensor:
    """Returns the weight of each row [R] in the loss, float64.

    ``mask[R]`` is the loss mask, ``sequence_mask_sums[S]`` its sum over each whole sequence. With N sequences and M tokens in the global
    batch: ``token-mean`` mask / M (Yu et al., 2025, equation 8); ``seq-mean-token-sum`` mask / N; ``seq-mean-token-mean`` mask / (N length)
    (Shao et al., 2024, equation 3); ``seq-mean-token-sum-norm`` mask / (N C) with the constant C (Liu et al., 2025, section 3.2)."""
    mask = mask.double()
    if loss_agg_mode == "token-mean":
        return mask / counts.tokens
    if loss_agg_mode == "seq-mean-token-sum":
        return mask / counts.sequences
    if loss_agg_mode == "seq-mean-token-mean":
        return mask / (counts.sequences * sequence_mask_sums.double()[sequence_of_row])
    return mask / (counts.sequences * counts.length_constant)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Returns ``sum(weights[R] * values[R])`` in float64; the gradient has the dtype of ``values``."""
    return (values.double() * weights).sum()


def sequence_sums(values: Tensor, sequence_of_row: Tensor, sequences: int) -> Tensor:
    """Returns ``values[R]`` summed by ``sequence_of_row[R]`` (int64) -> [S], in the order of the rows."""
    return torch.zeros(sequences, dtype=values.dtype, device=values.device).index_add(0, sequence_of_row, values)


def counts_of(sequences: Sequence[TrainSequence], length_constant: int = 1) -> GlobalCounts:
    """Returns the counts of the global batch of one optimizer step."""
    masks = [sum(sequence.loss_mask) for sequence in sequences]
    return GlobalCounts(math.fsum(masks), sum(mask > 0 for mask in masks), length_constant)
