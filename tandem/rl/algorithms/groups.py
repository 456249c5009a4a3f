"""Statistics over the valid samples of each prompt's group, shared by the group advantages."""

import torch
from torch import Tensor


def usable(valid: Tensor) -> Tensor:
    """Returns ``valid[P, G]`` bool without the groups that have fewer than two valid samples: a single reward cannot be compared, so its
    group is left out of the statistics and the loss."""
    return valid & (valid.sum(dim=1, keepdim=True) >= 2)


def group_mean(rewards: Tensor, valid: Tensor) -> Tensor:
    """Returns the mean of the valid rewards of each group: ``rewards[P, G]``, ``valid[P, G]`` bool -> [P, 1]; 0 without any."""
    kept = torch.where(valid, rewards, 0.0)
    return kept.sum(dim=1, keepdim=True) / valid.sum(dim=1, keepdim=True).clamp(min=1)


def group_std(rewards: Tensor, valid: Tensor) -> Tensor:
    """Returns the sample standard deviation (n - 1) of the valid rewards of each group -> [P, 1]; 0 with fewer than two."""
    deviation = torch.where(valid, rewards - group_mean(rewards, valid), 0.0)
    return (deviation.square().sum(dim=1, keepdim=True) / (valid.sum(dim=1, keepdim=True) - 1).clamp(min=1)).sqrt()


def zero_std(rewards: Tensor, valid: Tensor) -> Tensor:
    """Returns which usable groups have equal rewards, and so no learning signal -> [P] bool."""
    high = torch.where(valid, rewards, -torch.inf).amax(dim=1)
    low = torch.where(valid, rewards, torch.inf).amin(dim=1)
    return usable(valid).any(dim=1) & (high == low)
