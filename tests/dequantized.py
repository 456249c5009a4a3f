"""The nearest weights that the 4-bit formats of adapters in training can hold, after their definitions."""

from typing import Literal

import torch
from torch import Tensor

Kind = Literal["nf4", "int4"]
KINDS: tuple[Kind, ...] = ("nf4", "int4")


def dequantized(weight: Tensor, kind: Kind) -> Tensor:
    """Returns the nearest weight that ``kind`` can hold, in float64 and group by group: ``nf4`` after QLoRA, section 3; ``int4`` with a scale and a zero."""
    groups = []
    for group in weight.double().split(64 if kind == "nf4" else 128, dim=1):
        if kind == "nf4":
            # float32, as the largest magnitude is stored.
            scale = group.abs().amax(1, keepdim=True)
            above = torch.special.ndtri(torch.linspace(0.9677083, 0.5, 9, dtype=torch.float64)[:-1])
            below = -torch.special.ndtri(torch.linspace(0.9677083, 0.5, 8, dtype=torch.float64)[:-1])
            numbers = torch.cat([above, below, torch.zeros(1)]).sort().values
            numbers = numbers / numbers.max()
            groups.append(scale * numbers[(group[..., None] / scale[..., None] - numbers).abs().argmin(-1)])
        else:
            low, high = group.amin(1, keepdim=True).clamp(max=0), group.amax(1, keepdim=True).clamp(min=0)
            scale = ((high - low) / 15).float().double()
            zero = (-low / scale).round()
            groups.append(((group / scale).round() + zero).clamp(0, 15).sub(zero) * scale)
    return torch.cat(groups, dim=1)
