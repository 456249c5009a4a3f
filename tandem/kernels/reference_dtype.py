"""Constants and dtypes shared by the reference kernels."""

import torch

TILE_ROWS = 64
"""Rows of every matrix product."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums, roots and exponentials of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32
