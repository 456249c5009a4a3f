"""REINFORCE++ (Hu, 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization", sections 3.1 to 3.3).

Its advantage is the return of each token, normalised over all tokens of the global batch instead of a group (equation 8), so that a group
whose rewards are nearly equal is not divided by its small deviation. ``reinforce_plus_plus_baseline`` first subtracts the group's mean.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

WHITENING_EPSILON = 1e-8
"""Added to the variance, as in verl's ``masked_whiten``."""


def returns_to_go(reward: float, penalties: Tensor) -> Tensor:
    """Returns for each token the sum of the rewards from it on (gamma 1) [T]: ``reward``, given at the last token, minus ``penalties[T]``
    of this token and those after it."""
    return reward - penalties.flip(0).cumsum(0).flip(0)


def whitened(values: Sequence[Tensor], counted: Sequence[bool]) -> list[Tensor]:
    """Returns ``(value - mean) / sqrt(variance + 1e-8)`` for each token of each sample, float64.

    Args:
        values: the values of the tokens of each sample, [T_i] each.
        counted: which samples take part. Mean and variance (with n - 1) are those of their n tokens; the tokens of the others get 0.
    """
    tokens = torch.cat([value for value, counts in zip(values, counted, strict=True) if counts] or [torch.empty(0, dtype=torch.float64)])
    # A single token, or equal values, have no signal; the rounded mean of equal values may differ from them.
    if len(tokens) < 2 or tokens.min() == tokens.max():
        return [torch.zeros_like(value) for value in values]
    mean, scale = tokens.mean(), (tokens.var() + WHITENING_EPSILON).rsqrt()
    return [(value - mean) * scale if counts else torch.zeros_like(value) for value, counts in zip(values, counted, strict=True)]
