"""AWQ: scales up the salient input channels before rounding, and folds the inverse into the preceding operation (Lin et al., 2023)."""

import torch
from torch import Tensor

from tandem.kernels.quantized import plain_weight
from tandem.model.quantization.scheme import Scheme, round_to_nearest

GRID = 20
"""Exponents tried by the search, from 0 in steps of 1 / GRID (section 3.2 and the authors' code)."""

CLIP_STEPS = tuple(1.0 - i / 20 for i in range(10))
"""Shares of a group's largest magnitude that its range may be clipped to."""

SAMPLED_TOKENS = 512


def search_scales(weight: Tensor, x: Tensor, scheme: Scheme) -> Tensor:
    """Returns the scales [K] for the input channels of ``weight[N, K]`` under inputs ``x[T, K]``: ``s = mean |x|^a``, with the a in [0, 1)
    of the smallest output error (equations 4 and 5). All 1 for a = 0."""
    magnitude = x.abs().mean(0).clamp_min(1e-4)
    truth = x @ weight.t()
    best, best_error = torch.ones(weight.shape[1]), float("inf")
    for step in range(GRID):
        scales = magnitude.pow(step / GRID).clamp_min(1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        rounded = plain_weight(round_to_nearest(weight * scales, scheme)) / scales
        error = float((x @ rounded.t() - truth).square().mean())
        if error < best_error:
            best, best_error = scales, error
    return best


def clip(weight: Tensor, x: Tensor, scheme: Scheme) -> Tensor:
    """Returns ``weight[N, K]`` with every group clipped at the share of its largest magnitude that gives the smallest error of the group's
    part of the outputs under ``x[T, K]``."""
    group = scheme.group_size or weight.shape[1]
    parts = []
    for run, inputs in zip(weight.split(group, dim=1), x.split(group, dim=1), strict=True):
        own = Scheme(scheme.kind, 0, scheme.symmetric, half_scales=scheme.half_scales)
        hessian = inputs.t() @ inputs
        limit = run.abs().amax(1, keepdim=True)
        best, best_error = run, torch.full((len(run),), float("inf"))
        for share in CLIP_STEPS:
            candidate = run.clamp(-limit * share, limit * share)
            difference = plain_weight(round_to_nearest(candidate, own)) - run
            error = ((difference @ hessian) * difference).sum(1)
            better = error < best_error
            best = torch.where(better.unsqueeze(1), candidate, best)
            best_error = torch.where(better, error, best_error)
        parts.append(best)
    return torch.cat(parts, dim=1)


def sampled(x: Tensor) -> Tensor:
    """Returns at most ``SAMPLED_TOKENS`` evenly spaced rows of ``x[T, K]``."""
    return x[:: max(1, len(x) // SAMPLED_TOKENS)][:SAMPLED_TOKENS]
