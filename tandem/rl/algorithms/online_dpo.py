"""Online DPO: preference pairs from the completions that a step has drawn and scored (Guo et al., 2024, "Direct Language Model Alignment from
Online AI Feedback", algorithm 1), here of each group the best and the worst."""

from collections.abc import Sequence

import torch
from torch import Tensor


def best_and_worst(rewards: Tensor, valid: Tensor) -> list[tuple[int, int] | None]:
    """Returns for each group the completions with the largest and the smallest reward, the first of equal ones.

    ``rewards[P, G]``, ``valid[P, G]`` bool: which completions may be in a pair. A group whose valid rewards are all equal, or of which fewer
    than two are valid, has no pair (``None``)."""
    best = torch.where(valid, rewards, -torch.inf).argmax(dim=1).tolist()
    worst = torch.where(valid, rewards, torch.inf).argmin(dim=1).tolist()
    differs = [bool(of[high] > of[low]) and bool(counts[high]) for of, counts, high, low in zip(rewards, valid, best, worst, strict=True)]
    return [(high, low) if is_pair else None for high, low, is_pair in zip(best, worst, differs, strict=True)]


def pairs_of(groups: Sequence[Sequence[int]], rewards: Tensor, valid: Tensor) -> list[tuple[int, int]]:
    """Returns the pairs of ``best_and_worst`` by index of the samples; ``groups``: the samples of each row."""
    chosen = zip(groups, best_and_worst(rewards, valid), strict=True)
    return [(members[pair[0]], members[pair[1]]) for members, pair in chosen if pair is not None]
