"""What all parts of the reference kernels share."""

import torch

TILE_ROWS = 64
"""Rows of every matrix product."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums, roots and exponentials of ``dtype`` are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
