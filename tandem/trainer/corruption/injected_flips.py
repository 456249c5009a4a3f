"""Flips bits in a rank's arithmetic, as faults of a run ask for (``runtime.process.faults``)."""

from functools import partial

import torch
from torch import Tensor

from tandem.model.decoder import Decoder
from tandem.model.layer_pass import AroundLayer, LayerFunction
from tandem.runtime.process.faults import BitFlips

BIT = 4
"""A low bit of the mantissa in every dtype: the result stays finite, and looks right."""


def inject_flips(model: Decoder, flips: BitFlips) -> None:
    """Makes passes of ``model`` flip bits when ``flips`` says so: of the gradient of its first matrix, and of the output of its first layer."""
    matrix = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    matrix.register_hook(partial(_gradient, flips))  # type: ignore[no-untyped-call]
    model.around_layer = partial(_around, flips, model.around_layer)


def flipped(x: Tensor) -> Tensor:
    """Returns a copy of ``x`` with one bit of its first element flipped."""
    copy = x.clone()
    copy.detach().view(-1)[:1].view(torch.uint8)[0] ^= 1 << BIT
    return copy


def _gradient(flips: BitFlips, gradient: Tensor) -> Tensor | None:
    return flipped(gradient) if flips.now("gradient") else None


def _around(
    flips: BitFlips, inner: AroundLayer | None, index: int, layer: LayerFunction, x: Tensor | None, residual: Tensor
) -> tuple[Tensor, Tensor]:
    x, residual = layer(x, residual) if inner is None else inner(index, layer, x, residual)
    # A backward pass that recomputes the layer does not count as another product.
    is_forward = torch._C._current_graph_task_id() == -1  # type: ignore[attr-defined]
    return (flipped(x) if is_forward and torch.is_grad_enabled() and flips.now("matmul") else x), residual
