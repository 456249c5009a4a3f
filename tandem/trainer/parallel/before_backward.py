"""Being told that the backward pass is about to enter a layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class BeforeBackward(torch.autograd.Function):
    """(x, residual) as they are; ``told(index)`` is called in the backward pass before that of the layer whose outputs go through here."""

    @staticmethod
    def forward(ctx: Any, told: Callable[[int], None], index: int, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        ctx.told, ctx.index = told, index
        return x.view_as(x), residual.view_as(residual)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor, Tensor]:
        ctx.told(ctx.index)
        return None, None, gradients[0], gradients[1]
