"""Products with quantized weights that are never trained (Dettmers et al., 2023, "QLoRA"): the gradient goes through them to what is trained before."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.api import Kernels
from tandem.kernels.quantized import PackedQuantized


class FrozenLinear(torch.autograd.Function):
    """``linear_packed`` with the gradient of ``x``, for which the weight is decoded again: no decoded weight is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: PackedQuantized, bias: Tensor | None, kernels: Kernels) -> Tensor:
        ctx.weight, ctx.kernels = weight, kernels
        return kernels.linear_packed(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        kernels: Kernels = ctx.kernels
        decoded = kernels.unpack_quantized(ctx.weight).to(grad.dtype)
        return kernels.linear(grad.contiguous(), decoded.t().contiguous(), None), None, None, None


def frozen_linear(kernels: Kernels, linear: Callable[[Tensor, Any, Tensor | None], Tensor], x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Computes ``x[T, K]`` -> [T, N] as ``linear`` does, and with the bits of ``linear_packed`` where ``weight`` is quantized."""
    if not isinstance(weight, PackedQuantized):
        return linear(x, weight, bias)
    out: Tensor = FrozenLinear.apply(x, weight, bias, kernels)
    return out
