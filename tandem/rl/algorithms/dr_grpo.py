"""Dr. GRPO's advantages (Liu et al., 2025, "Understanding R1-Zero-Like Training", section 3.2): no division by the std.

The other half of Dr. GRPO, a constant instead of each answer's length, is the loss_agg_mode ``seq-mean-token-sum-norm``.
"""

import torch
from torch import Tensor

from tandem.rl.algorithms.groups import group_mean, usable


def dr_grpo_advantages(rewards: Tensor, valid: Tensor) -> Tensor:
    """Returns ``r - mean(r)`` within each group. Shapes and masking as in ``grpo_advantages``."""
    valid = usable(valid)
    return torch.where(valid, rewards - group_mean(rewards, valid), 0.0)
