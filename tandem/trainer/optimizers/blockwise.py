"""Block-wise 8-bit coding: each block of a flat tensor is divided by its largest magnitude, and each quotient is rounded to the nearest of
256 values that are dense near 0 (Dettmers et al., 2022, "8-bit optimizers via block-wise quantization")."""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256
CODES, SCALES = "_codes", "_scales"
"""Suffixes of the kinds of coded state tensors."""


def numbers_each(kind: str) -> int:
    """Returns how many elements of a parameter one element of the state tensor ``kind`` covers."""
    return BLOCK if kind.endswith(SCALES) else 1


def is_coded(kind: str) -> bool:
    """Returns whether the state tensor ``kind`` is flat and in blocks."""
    return kind.endswith((CODES, SCALES))


class Coded(NamedTuple):
    """``codes[n]`` uint8, indices into the table of values; ``scales[ceil(n / BLOCK)]`` fp32, the largest magnitude of each block."""

    codes: Tensor
    scales: Tensor


def dynamic_values(signed: bool) -> Tensor:
    """Returns the 256 values of dynamic tree quantization, ascending, in [-1, 1] or [0, 1], fp32 (Dettmers, 2016; section 1.3 of the paper
    above).

    There are seven decades, each with twice the values of the one below it, evenly spaced, plus 0 and 1. Without a sign, the bit it would
    use doubles every decade's values."""
    values_so_far = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade + (0 if signed else 1))
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64)
        means = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        values_so_far += means + ([-value for value in means] if signed else [])
    # The seven decades have 254 values; 0 and 1 make 256.
    return torch.tensor(sorted(values_so_far), dtype=torch.float32)


class Codebook:
    """A table of values, with encoding and decoding."""

    def __init__(self, signed: bool, device: torch.device) -> None:
        self._signed = signed
        self.values = dynamic_values(signed).to(device)
        self._borders = (self.values[1:] + self.values[:-1]) / 2

    def encode(self, x: Tensor) -> Coded:
        """Encodes ``x[n]`` fp32. In an unsigned table only 0 encodes to 0: a second moment of 0 with a nonzero first moment would make an
        unbounded step."""
        blocks = torch.nn.functional.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(1)
        quotients = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
        codes = torch.bucketize(quotients, self._borders, out_int32=True)
        codes = codes if self._signed else codes.maximum((quotients > 0).int())
        codes = codes.to(torch.uint8)
        return Coded(codes.view(-1)[: len(x)].clone(), scales)

    def decode(self, coded: Coded) -> Tensor:
        """Returns the elements [n] fp32 of ``coded``."""
        count = len(coded.codes)
        quotients = self.values[coded.codes.int()]
        return torch.nn.functional.pad(quotients, (0, -count % BLOCK)).view(-1, BLOCK).mul_(coded.scales.unsqueeze(1)).view(-1)[:count]


def codebook(moment: str, device: torch.device) -> Codebook:
    """Returns the table for one of AdamW's moments."""
    return Codebook(moment == "exp_avg", device)
