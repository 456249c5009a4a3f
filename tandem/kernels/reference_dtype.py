"""Constants, dtypes and the soft cap, shared by the reference kernels."""

import torch
from torch import Tensor

TILE_ROWS = 64
"""Rows of every matrix product."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums, roots and exponentials of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Returns ``cap tanh(x / cap)``, computed in at least fp32."""
    # Contiguous, so that an element never moves between a vector and a scalar remainder.
    wide = x.contiguous().to(compute_dtype(x.dtype))
    return (torch.tanh(wide / cap) * cap).to(x.dtype)


def soft_cap_slope(capped: Tensor, cap: float) -> Tensor:
    """Returns the slope of ``soft_cap`` where its value is ``capped``, in at least fp32."""
    return 1 - (capped.to(compute_dtype(capped.dtype)) / cap).square()
