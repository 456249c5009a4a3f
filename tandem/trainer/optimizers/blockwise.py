"""Numbers in 8 bits by blocks: each block of a flat tensor is divided by its largest magnitude, and each quotient is written as the
nearest of 256 values that lie dense near 0 (Dettmers et al., 2022, "8-bit optimizers via block-wise quantization")."""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256
CODES, SCALES = "_codes", "_scales"
"""How the names of what a state holds so end."""


def numbers_each(kind: str) -> int:
    """How many numbers of a parameter each number stands for of what a state holds as ``kind``."""
    return BLOCK if kind.endswith(SCALES) else 1


def is_coded(kind: str) -> bool:
    """Whether what a state holds as ``kind`` is flat, in blocks."""
    return kind.endswith((CODES, SCALES))


class Coded(NamedTuple):
    """``codes[n]`` uint8, the places in the table of values; ``scales[ceil(n / BLOCK)]`` fp32, the largest magnitude of each block."""

    codes: Tensor
    scales: Tensor


def dynamic_values(signed: bool) -> Tensor:
    """The 256 values of dynamic tree quantisation, ascending, from [-1, 1] or [0, 1], fp32 (Dettmers, 2016; section 1.3 of the paper
    above): seven decades, each with twice the values of the one below it, evenly spaced; 0 and 1 are among them. Without a sign the
    bit that it took doubles every decade's values."""
    found = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade + (0 if signed else 1))
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64)
        means = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        found += means + ([-value for value in means] if signed else [])
    # Seven decades have 254 values; the two more are 0 and 1.
    return torch.tensor(sorted(found), dtype=torch.float32)


class Codebook:
    """One table of values and what is looked up in it."""

    def __init__(self, signed: bool, device: torch.device) -> None:
        self._signed = signed
        self.values = dynamic_values(signed).to(device)
        self._borders = (self.values[1:] + self.values[:-1]) / 2

    def encode(self, x: Tensor) -> Coded:
        """``x[n]`` fp32, coded. Without a sign only 0 becomes 0: a second moment of 0 under a first one that is not would be a step
        without bound."""
        blocks = torch.nn.functional.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(1)
        quotients = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
        codes = torch.bucketize(quotients, self._borders, out_int32=True)
        codes = codes if self._signed else codes.maximum((quotients > 0).int())
        codes = codes.to(torch.uint8)
        return Coded(codes.view(-1)[: len(x)].clone(), scales)

    def decode(self, coded: Coded) -> Tensor:
        """The numbers [n] fp32 that ``coded`` stands for."""
        count = len(coded.codes)
        found = self.values[coded.codes.int()]
        return torch.nn.functional.pad(found, (0, -count % BLOCK)).view(-1, BLOCK).mul_(coded.scales.unsqueeze(1)).view(-1)[:count]


def codebook(moment: str, device: torch.device) -> Codebook:
    """The table of one of AdamW's moments."""
    return Codebook(moment == "exp_avg", device)
