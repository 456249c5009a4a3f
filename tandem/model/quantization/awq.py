"""AWQ: scales up the salient input channels before rounding, and folds the inverse into the preceding operation (Lin et al., 2023)."""

import torch
from torch import Tensor, nn

from tandem.kernels.quantized import plain_weight
from tandem.model.layer import factor_of_norm
from tandem.model.quantization.scheme import Scheme, round_to_nearest

GRID = 20
"""Exponents tried by the search, from 0 in steps of 1 / GRID (section 3.2 and the authors' code)."""

CLIP_STEPS = tuple(1.0 - i / 20 for i in range(10))
"""Shares of a group's largest magnitude that its range may be clipped to."""

SAMPLED_TOKENS = 512


def search_scales(weight: Tensor, x: Tensor, scheme: Scheme, powers_of_2: bool = False, heads: int = 1) -> Tensor:
    """Returns the scales [K] for the input channels of ``weight[N, K]`` under inputs ``x[T, K]``: ``s = mean |x|^a``, with the a in [0, 1)
    of the smallest output error (equations 4 and 5). All 1 for a = 0. ``powers_of_2``: rounded to those, which change no bit of a product.
    ``heads``: the channels are those of so many heads side by side, which share scales [K / heads]."""
    magnitude = x.abs().mean(0).view(heads, -1).mean(0).clamp_min(1e-4)
    truth = x @ weight.t()
    best, best_error = torch.ones_like(magnitude), float("inf")
    for step in range(GRID):
        scales = magnitude.pow(step / GRID).clamp_min(1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        scales = scales.log2().round().exp2() if powers_of_2 else scales
        every = scales.repeat(heads)
        rounded = plain_weight(round_to_nearest(weight * every, scheme)) / every
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


def fold_into_norm(norm: nn.Parameter, scales: Tensor, from_one: bool, dtype: torch.dtype) -> Tensor:
    """Divides what the norm with weights ``norm[H]`` multiplies with, the weights or 1 plus them if ``from_one``, by ``scales[H]``; returns the scales that
    this amounts to once the weights are rounded to ``dtype``, in which they are stored. A channel whose scale that changes by a factor of 2, as may be near
    a weight of -1, is left as it is, with the scale 1."""
    factor = factor_of_norm(norm.detach(), from_one)
    changed = (factor / scales - (1.0 if from_one else 0.0)).to(dtype).to(norm.dtype)
    exact = factor / factor_of_norm(changed, from_one)
    is_usable = (exact > scales / 2) & (exact < scales * 2)
    norm.copy_(torch.where(is_usable, changed, norm))
    return torch.where(is_usable, exact, 1.0)


def sampled(x: Tensor) -> Tensor:
    """Returns at most ``SAMPLED_TOKENS`` evenly spaced rows of ``x[T, K]``."""
    return x[:: max(1, len(x) // SAMPLED_TOKENS)][:SAMPLED_TOKENS]
