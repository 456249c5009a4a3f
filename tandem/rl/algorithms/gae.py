"""Generalized advantage estimation (Schulman et al., 2016, "High-dimensional continuous control using generalized advantage estimation", equations 11 to 16).

    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lambda A_{t+1}
    R_t     = A_t + V_t

V_t is the critic's value of the state before token t, and is 0 after the last token. Only tokens that the policy wrote are states of the chain: the value
after one is that of the next one that it wrote, so that observations between them are skipped, as in verl. The returns R, which the critic learns, are
those before advantages are whitened.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Estimated(NamedTuple):
    """The ``advantages[T]`` and ``returns[T]`` of a completion's sampled tokens, float64."""

    advantages: Tensor
    returns: Tensor


def token_rewards(score: float, penalties: Tensor) -> Tensor:
    """Returns the reward of each sampled token [T]: minus ``penalties[T]``, with ``score`` added at the last one."""
    rewards = -penalties
    if len(rewards):
        rewards[-1] += score
    return rewards


def generalized_advantages(rewards: Tensor, values: Tensor, gamma: float, gae_lambda: float) -> Estimated:
    """Returns the advantages and returns of the sampled tokens of one completion, given ``rewards[T]`` and ``values[T]`` of the states before them."""
    advantage, after, backwards = 0.0, 0.0, []
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        advantage = reward + gamma * after - value + gamma * gae_lambda * advantage
        after = value
        backwards.append(advantage)
    advantages = torch.tensor(backwards[::-1], dtype=torch.float64)
    return Estimated(advantages, advantages + values.double())
