"""Launches the programs over rows: norms, the gate of an MLP and soft caps."""

import torch
from torch import Tensor

from tandem.kernels.triton.launch import UNFUSED, check, dense, power_of_two
from tandem.kernels.triton.programs import rows as programs
from tandem.layout.shapes import Activation

KINDS: dict[Activation, int] = {"silu": 0, "gelu_pytorch_tanh": 1, "clamped_swiglu": 2}
"""The codes of ``programs.common``."""


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """Returns (the norm of ``x`` or of ``x + residual``, that sum), over the last axis, as ``Kernels.rms_norm``. A residual stream of a wider dtype than the
    layers' outputs keeps its dtype."""
    width = x.shape[-1]
    check("norm weight", weight, *weight.shape[:-1], width)
    check("norm x", x, *x.shape)
    x, weight = dense(x), dense(weight)
    other = x if residual is None else dense(residual)
    out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, other.dtype))
    total = x if residual is None else torch.empty_like(out)
    rows = x.numel() // width
    if rows:
        block = power_of_two(width)
        programs.rms_norm[(rows,)](
            x, other, weight, out, total, width, weight.numel() // width, eps, ADD=residual is not None, CENTRED=centred, BLOCK=block,
            num_warps=_warps(block), **UNFUSED,
        )  # fmt: skip
    return out, total


def gate_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """Runs ``Kernels.silu_mul``, ``gelu_mul`` or ``clamped_swiglu_mul``."""
    rows, double = gate_up.shape
    check("gate_mul gate_up", gate_up, rows, double)
    gate_up, width = dense(gate_up), double // 2
    out = gate_up.new_empty(rows, width)
    if out.numel():
        block = min(1024, power_of_two(width))
        programs.gate_mul[(rows, -(-width // block))](gate_up, out, width, KIND=KINDS[activation], BLOCK=block, num_warps=4, **UNFUSED)
    return out


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Runs ``Kernels.soft_cap``."""
    rows, width = x.shape
    check("soft_cap x", x, rows, width)
    x = dense(x)
    out = torch.empty_like(x)
    if out.numel():
        block = min(1024, power_of_two(width))
        programs.soft_cap[(rows, -(-width // block))](x, out, width, CAP=cap, BLOCK=block, num_warps=4, **UNFUSED)
    return out


def _warps(block: int) -> int:
    return max(1, min(16, block // 256))
