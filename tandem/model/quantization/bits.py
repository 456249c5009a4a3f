"""Four-bit codes in 32-bit words, in the layouts of the checkpoint formats. Codes are uint8 0..15.

Along the last axis a word contains eight codes, the first in its lowest bits; AWQ's GEMM layout (Lin et al., 2023; AutoAWQ) has columns 0 2
4 6 1 3 5 7 there instead.
"""

import torch
from torch import Tensor

CODES_A_WORD = 8
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_IN_ORDER = tuple(range(CODES_A_WORD))


def unpack_words(words: Tensor, count: int, order: tuple[int, ...] = _IN_ORDER) -> Tensor:
    """Unpacks ``words[R, C]`` int32 -> codes [R, ``count``]; the rest is padding."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    nibbles = ((words.to(torch.int32).unsqueeze(-1) >> shifts) & 15).to(torch.uint8)
    out = torch.empty_like(nibbles)
    out[..., list(order)] = nibbles
    return out.flatten(1)[:, :count].contiguous()


def pack_words(codes: Tensor, order: tuple[int, ...] = _IN_ORDER) -> Tensor:
    """Packs ``codes[R, n]`` -> [R, ceil(n / 8)] int32, padded with zeros."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % CODES_A_WORD)).to(torch.int64)
    eight = padded.view(len(codes), -1, CODES_A_WORD)[..., list(order)]
    words = (eight << torch.arange(0, 32, 4)).sum(-1)
    # The top code fills the sign bit of an int32.
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
