"""An autograd hook that runs before the backward pass of a layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class BeforeBackward(torch.autograd.Function):
    """Returns (x, residual) unchanged; calls ``told(index)`` in the backward pass before that of the layer whose outputs it was given."""

    @staticmethod
    def forward(ctx: Any, before: Callable[[int], None], index: int, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        ctx.told, ctx.index = before, index
        return x.view_as(x), residual.view_as(residual)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor, Tensor]:
        ctx.told(ctx.index)
        return None, None, gradients[0], gradients[1]
