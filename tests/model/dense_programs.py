"""Decoders whose layers are one call, and the same kernels called one by one."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tandem.kernels import Kernels
from tandem.layout.rotary import NO_SCALING, Rotary
from tandem.layout.shapes import ModelShapes, Multipliers
from tandem.model.decoder import Decoder
from tandem.model.initialise import initialise
from tandem.model.quantization.scheme import Scheme, Stored

Quantize = Callable[[int, Tensor], Stored]

QWEN3 = ModelShapes("qwen3", 67, 48, 2, 4, 2, 16, 80, 160, True, qk_norm=True)
DENSE = {
    "norms of queries and keys": QWEN3,
    "biases, windows, one key head": replace(
        QWEN3, num_key_value_heads=1, qk_norm=False, attention_bias=True, output_bias=True, mlp_bias=True, layer_windows=(None, 19)
    ),
    "norms after, from one, soft caps, GELU": replace(
        QWEN3, post_norms=True, norms_from_one=True, scaled_embedding=True, score_cap=3.0, logit_cap=5.0, activation="gelu_pytorch_tanh",
        layer_windows=(17, None), window_rotary=Rotary(500.0, NO_SCALING),
    ),
    "parallel blocks of centred norms, a layer without rotation": replace(QWEN3, parallel_blocks=True, centred_norms=True, unrotated_layers=(1,)),
    "multipliers and sinks": replace(QWEN3, multipliers=Multipliers(residual=0.22, embedding=3.0), attention_sinks=True),
}  # fmt: skip
LENGTHS = (1, 17, 40, 33)


class OneByOne:
    """The same kernels without their program of all layers."""

    def __init__(self, inner: Kernels) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def packed(shapes: ModelShapes, kernels: Any, quantize: Quantize | None = None, scheme: Scheme | None = None) -> Decoder:
    """Random weights without special values. ``quantize(place, weight[N, K])``: a matrix by its place in the layer as it is packed, as of a
    quantized folder. ``scheme``: how matrices are rounded as they are packed."""
    decoder, generator = Decoder(shapes, kernels), torch.Generator().manual_seed(2)
    initialise(decoder, 1)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.15 * noise)
    for layer in decoder._layers() if quantize else ():
        for place, linear in enumerate(layer.linears()):
            assert linear.weight is not None
            linear.stored, linear.weight = (quantize(place, linear.weight.detach()),), None
    decoder.quantization = scheme
    decoder.pack()
    return decoder


def steps() -> list[list[tuple[int, int]]]:
    """Whole prompts, parts of them and single tokens, in the same steps; in the first, enough for threads that compute some sequences each."""
    draw = random.Random(3)
    mixed = [[(s, draw.choice((1, 1, 1, 3, 16))) for s in draw.sample(range(len(LENGTHS)), 3)] for _ in range(10)]
    return [[(s, 12) for s in range(len(LENGTHS))], *mixed, [(s, 1000) for s in range(len(LENGTHS))]]
