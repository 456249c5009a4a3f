"""MXFP4 (Open Compute Project, 2023, "OCP Microscaling Formats (MX)"): numbers of 4 bits (E2M1), of which 32 share a scale, a power of two (E8M0)."""

import torch
from torch import Tensor

BLOCK = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""By code."""
SCALE_BIAS = 127


def decode(blocks: Tensor, scales: Tensor, columns: int) -> Tensor:
    """Returns the weight [N, ``columns``] in bf16, which represents every value, of ``blocks[N, G, 16]`` uint8, two codes in a byte, the first in its lower
    half, and ``scales[N, G]`` uint8."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2)
    values = torch.tensor(VALUES, dtype=torch.float32, device=blocks.device)[codes.long()]
    scaled = torch.ldexp(values, scales.unsqueeze(-1).int() - SCALE_BIAS)
    return scaled.flatten(1)[:, :columns].to(torch.bfloat16)
