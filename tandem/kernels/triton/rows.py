"""Launches the programs over rows: norms and the gate of an MLP."""

import torch
from torch import Tensor

from tandem.kernels.triton.launch import UNFUSED, check, dense, power_of_two
from tandem.kernels.triton.programs import rows as programs


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (the norm of ``x`` or of ``x + residual``, that sum), over the last axis. A residual stream of a wider dtype than the layers'
    outputs keeps its dtype."""
    width = x.shape[-1]
    check("norm weight", weight, width)
    check("norm x", x, *x.shape)
    x, weight = dense(x), dense(weight)
    other = x if residual is None else dense(residual)
    out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, other.dtype))
    total = x if residual is None else torch.empty_like(out)
    rows = x.numel() // width
    if rows:
        block = power_of_two(width)
        programs.rms_norm[(rows,)](
            x, other, weight, out, total, width, eps, ADD=residual is not None, BLOCK=block, num_warps=_warps(block), **UNFUSED
        )
    return out, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """Runs ``Kernels.silu_mul``."""
    rows, double = gate_up.shape
    check("silu_mul gate_up", gate_up, rows, double)
    gate_up, width = dense(gate_up), double // 2
    out = gate_up.new_empty(rows, width)
    if out.numel():
        block = min(1024, power_of_two(width))
        programs.silu_mul[(rows, -(-width // block))](gate_up, out, width, BLOCK=block, num_warps=4, **UNFUSED)
    return out


def _warps(block: int) -> int:
    return max(1, min(16, block // 256))
