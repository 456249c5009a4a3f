"""Floating-point operations of a training step as the literature counts them, and what a GPU can do at most. Imports no torch.

Model FLOPs utilisation (Chowdhery et al., 2022, "PaLM", appendix B): 6 operations a parameter and token, and 12 L H Q T a token for
attention over T tokens, whose causal half is not discounted. What recomputation repeats is not counted; nor is what the embedding looks up.
"""

from collections.abc import Iterable
from typing import NamedTuple

from tandem.layout.shapes import ModelShapes


class Peak(NamedTuple):
    """A part of what torch calls the device, and its dense bf16 rate in 10^12 operations a second, by ``source``."""

    name: str
    bf16_tflops: float
    source: str


PEAKS = (
    Peak("H200 NVL", 835.5, "NVIDIA H200 datasheet: 1,671 with sparsity"),
    Peak("H200", 989.5, "NVIDIA H200 datasheet, SXM: 1,979 with sparsity"),
    Peak("H100 NVL", 835.5, "NVIDIA H100 datasheet: 1,671 with sparsity"),
    Peak("H100 PCIe", 756.5, "NVIDIA H100 PCIe product brief: 1,513 with sparsity"),
    Peak("H100 80GB HBM3", 989.5, "NVIDIA H100 datasheet, SXM: 1,979 with sparsity"),
    Peak("A100", 312.0, "NVIDIA A100 datasheet"),
)
"""The first whose name is part of the device's."""


def peak_of(device_name: str) -> Peak | None:
    return next((peak for peak in PEAKS if peak.name in device_name), None)


def matrix_parameters(shapes: ModelShapes) -> int:
    """Weights of the matrices that a token meets: of experts those that it is sent to; the head, and not the embedding."""
    parameters = shapes.vocab_size * shapes.hidden_size
    for layer in range(shapes.num_hidden_layers):
        parameters += shapes.hidden_size * (shapes.qkv_size + shapes.query_size)
        experts = shapes.experts_of(layer)
        if experts is None:
            parameters += 3 * shapes.hidden_size * shapes.intermediate_size
        else:
            parameters += shapes.hidden_size * (experts.num_experts + 3 * experts.num_experts_per_tok * experts.intermediate_size)
    return parameters


def step_flops(shapes: ModelShapes, lengths: Iterable[int]) -> int:
    """Of the forward and the backward pass of sequences of ``lengths`` tokens, each of which sees its own alone."""
    matrices, total = matrix_parameters(shapes), 0
    for length in lengths:
        seen = sum(min(length, shapes.window(layer) or length) for layer in range(shapes.num_hidden_layers))
        total += length * (6 * matrices + 12 * shapes.query_size * seen)
    return total
