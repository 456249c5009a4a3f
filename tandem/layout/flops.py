"""Floating-point operations of a training step as counted in the literature, and the peak rates of GPUs. Imports no torch.

Model FLOPs utilisation (Chowdhery et al., 2022, "PaLM", appendix B): 6 operations per parameter and token, and 12 L H Q T per token for
attention over T tokens, without a discount for the causal half. Recomputation and embedding look-ups are not counted.
"""

from collections.abc import Iterable
from typing import NamedTuple

from tandem.layout.shapes import ModelShapes


class Peak(NamedTuple):
    """A substring of torch's device name, and the device's dense bf16 rate in 10^12 operations per second, from ``source``."""

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
"""The first entry whose name is a substring of the device's name applies."""


def peak_of(device_name: str) -> Peak | None:
    return next((peak for peak in PEAKS if peak.name in device_name), None)


def matrix_parameters(shapes: ModelShapes) -> int:
    """Returns the weights of the matrices that a token is multiplied with: of experts those that it is routed to; the head, but not the
    embedding."""
    parameters = shapes.head_rows * shapes.hidden_size
    for layer in range(shapes.num_hidden_layers):
        parameters += shapes.hidden_size * (shapes.qkv_size + shapes.query_size)
        experts = shapes.experts_of(layer)
        if experts is None:
            parameters += shapes.mlp_matrices * shapes.hidden_size * shapes.intermediate_size
        else:
            parameters += shapes.hidden_size * (experts.num_experts + 3 * experts.num_experts_per_tok * experts.intermediate_size)
    return parameters


def step_flops(shapes: ModelShapes, lengths: Iterable[int]) -> int:
    """Returns the operations of the forward and the backward pass of sequences of ``lengths`` tokens, each of which attends to its own
    tokens."""
    matrices, total = matrix_parameters(shapes), 0
    for length in lengths:
        seen = sum(min(length, shapes.window(layer) or length) for layer in range(shapes.num_hidden_layers))
        total += length * (6 * matrices + 12 * shapes.query_size * seen)
    return total
