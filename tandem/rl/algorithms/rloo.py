"""REINFORCE leave-one-out (Kool et al., 2019; Ahmadian et al., 2024, "Back to Basics", equation 8)."""

import torch
from torch import Tensor

from tandem.rl.algorithms.groups import group_mean, usable


def rloo_advantages(rewards: Tensor, valid: Tensor) -> Tensor:
    """Returns ``r_i - mean of the others' r`` within each group, which is ``n / (n - 1) (r_i - mean(r))`` for n valid samples. Shapes and
    masking as in ``grpo_advantages``."""
    valid = usable(valid)
    count = valid.sum(dim=1, keepdim=True)
    return torch.where(valid, (rewards - group_mean(rewards, valid)) * count / (count - 1).clamp(min=1), 0.0)
