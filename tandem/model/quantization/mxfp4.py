"""MXFP4 (Open Compute Project, 2023, "OCP Microscaling Formats (MX)"): numbers of 4 bits (E2M1), of which 32 share a scale, a power of two (E8M0)."""

import torch
from torch import Tensor

from tandem.kernels.api import Kernels
from tandem.kernels.quantized import MXFP4_NUMBERS, PackedQuantized, QuantizedWeight, dequantize

BLOCK = 32
SCALE_BIAS = 127
_EXPONENT_OF_FOUR = 2
_MAGNITUDES = len(MXFP4_NUMBERS) // 2


def decode(blocks: Tensor, scales: Tensor, columns: int) -> Tensor:
    """Returns the weight [N, ``columns``] in bf16, which represents every value, of ``blocks[N, G, 16]`` uint8, two codes in a byte, the first in its lower
    half, and ``scales[N, G]`` uint8."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2)
    values = torch.tensor(MXFP4_NUMBERS, dtype=torch.float32, device=blocks.device)[codes.long()]
    scaled = torch.ldexp(values, scales.unsqueeze(-1).int() - SCALE_BIAS)
    return scaled.flatten(1)[:, :columns].to(torch.bfloat16)


def encode(weight: Tensor) -> QuantizedWeight | None:
    """Returns ``weight[N, K]`` in codes if they stand for each of its numbers exactly, as they do for what ``decode`` returns; else ``None``. The largest of a
    block is 4 or 6 times its scale: numbers that are whole multiples of a half of a smaller scale are so of this one."""
    wide = weight.detach().float()
    blocks = torch.nn.functional.pad(wide, (0, -wide.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    exponents = torch.frexp(largest).exponent.int() - 1 - _EXPONENT_OF_FOUR
    exponents = torch.where(largest > 0, exponents, 0).clamp(-SCALE_BIAS, SCALE_BIAS)
    scales = torch.ldexp(torch.ones_like(largest), exponents)
    ratio = (blocks / scales.unsqueeze(-1)).flatten(1)[:, : wide.shape[1]]
    magnitudes = ratio.new_tensor(MXFP4_NUMBERS[:_MAGNITUDES])
    codes = torch.bucketize(ratio.abs(), magnitudes).clamp_max(_MAGNITUDES - 1) + _MAGNITUDES * ratio.signbit()
    coded = QuantizedWeight("mxfp4", codes.to(torch.uint8), scales, None, BLOCK)
    return coded if torch.equal(dequantize(coded).view(torch.int32), wide.view(torch.int32)) else None


def pack_exactly(kernels: Kernels, weights: Tensor) -> PackedQuantized | None:
    """Returns ``weights[G, N, K]`` packed in their codes; ``None`` if a number of them has none, or ``kernels`` do not multiply with codes."""
    if not kernels.multiplies_coded_groups:
        return None
    coded = []
    for weight in weights:
        own = encode(weight)
        if own is None:
            return None
        coded.append(own)
    return kernels.pack_quantized_groups(coded)
