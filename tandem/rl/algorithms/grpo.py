"""Group-relative advantages (Shao et al., 2024, "DeepSeekMath", section 4.1.2: outcome supervision)."""

import torch
from torch import Tensor

from tandem.rl.algorithms.groups import group_mean, group_std, usable, zero_std


def grpo_advantages(rewards: Tensor, valid: Tensor, epsilon: float) -> Tensor:
    """``(r - mean(r)) / (std(r) + epsilon)`` within each group; the sample standard deviation, as TRL and verl take it.

    ``rewards[P, G]``: P prompts, G samples of each. ``valid[P, G]`` bool: which have a reward at all; the others touch
    nothing. -> [P, G], 0 where not valid, in groups with fewer than two valid samples and in groups of equal rewards.
    """
    valid = usable(valid)
    advantages = (rewards - group_mean(rewards, valid)) / (group_std(rewards, valid) + epsilon)
    # The mean of equal rewards may be rounded; what is left above the line would be noise divided by noise.
    return torch.where(valid & ~zero_std(rewards, valid)[:, None], advantages, 0.0)
