"""What the group advantages share: statistics over the valid samples of each prompt's group."""

import torch
from torch import Tensor


def usable(valid: Tensor) -> Tensor:
    """``valid[P, G]`` bool, without the groups that have fewer than two valid samples: a single reward has nothing to
    be compared with, so such a group leaves the statistics and the loss."""
    return valid & (valid.sum(dim=1, keepdim=True) >= 2)


def group_mean(rewards: Tensor, valid: Tensor) -> Tensor:
    """Mean of the valid rewards of each group: ``rewards[P, G]``, ``valid[P, G]`` bool -> [P, 1]; 0 without any."""
    kept = torch.where(valid, rewards, 0.0)
    return kept.sum(dim=1, keepdim=True) / valid.sum(dim=1, keepdim=True).clamp(min=1)


def group_std(rewards: Tensor, valid: Tensor) -> Tensor:
    """Sample standard deviation (n - 1) of the valid rewards of each group -> [P, 1]; 0 with fewer than two."""
    deviation = torch.where(valid, rewards - group_mean(rewards, valid), 0.0)
    return (deviation.square().sum(dim=1, keepdim=True) / (valid.sum(dim=1, keepdim=True) - 1).clamp(min=1)).sqrt()


def zero_std(rewards: Tensor, valid: Tensor) -> Tensor:
    """Which usable groups have one and the same reward throughout, and so teach nothing -> [P] bool."""
    high = torch.where(valid, rewards, -torch.inf).amax(dim=1)
    low = torch.where(valid, rewards, torch.inf).amin(dim=1)
    return usable(valid).any(dim=1) & (high == low)
