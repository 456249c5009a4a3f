"""Linear layers on a GPU's fp8 units: e4m3 operands, an e5m2 gradient (Micikevicius et al., 2022), one scale per tensor."""

from typing import Any

import torch
from torch import Tensor

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
FP8_CAPABILITY = (8, 9)
"""The first compute capability with fp8 units."""
ALIGNED = 16
"""The units need rows and columns in multiples of this."""


def power_of_two_scale(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the largest magnitude of ``x``, and the power of two that brings it closest to the largest number of ``dtype``: scaling by it
    is exact."""
    largest = x.abs().amax() if x.numel() else x.new_zeros(())
    exponent = torch.floor(torch.log2(LARGEST[dtype] / largest.double().clamp_min(1e-300)))
    return largest, torch.exp2(exponent.clamp(-126, 126)).to(x.dtype)


def fits_fp8_units(weight: Tensor) -> bool:
    """Returns whether the units support the sizes of ``weight[N, K]``."""
    return not any(size % ALIGNED for size in weight.shape)


def _codes(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns ``x[R, C]`` in fp8 and the fp32 factor of its codes: NaN if ``x`` is not finite, so that an overflow is visible."""
    largest, scale = power_of_two_scale(x, dtype)
    back = torch.where(largest.isfinite(), 1 / scale.float(), torch.nan)
    return (x * scale).to(dtype).contiguous(), back


def _columns(x: Tensor) -> Tensor:
    """Returns ``x`` with contiguous columns."""
    return x.t().contiguous().t()


class Fp8Linear(torch.autograd.Function):
    """Computes ``x[T, K] @ weight[N, K].T + bias[N]`` -> [T, N] bf16, with N and K multiples of ``ALIGNED``. Products are summed in fp32.
    The gradient of the weight is the fp32 product of the codes, that of x is bf16 in x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = len(x)
        # The gradient of the weight sums over rows, so zero rows add nothing.
        padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % ALIGNED))
        own, own_back = _codes(padded, torch.float8_e4m3fn)
        other, other_back = _codes(weight, torch.float8_e4m3fn)
        out = torch._scaled_mm(own, other.t(), scale_a=own_back, scale_b=other_back, out_dtype=torch.bfloat16, use_fast_accum=True)[:rows]
        ctx.save_for_backward(own, own_back, other, other_back)
        ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        return out if bias is None else out + bias.to(out.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        own, own_back, other, other_back = ctx.saved_tensors
        rows = len(grad)
        padded = torch.nn.functional.pad(grad, (0, 0, 0, len(own) - rows))
        codes, back = _codes(padded, torch.float8_e5m2)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            product = torch._scaled_mm(codes, _columns(other), scale_a=back, scale_b=other_back, out_dtype=torch.bfloat16)
            grad_x = product[:rows].to(ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            turned = codes.t().contiguous()
            grad_weight = torch._scaled_mm(turned, _columns(own), scale_a=back, scale_b=own_back, out_dtype=torch.float32)
        grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias
