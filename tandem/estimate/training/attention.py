"""Seconds of causal attention: its two products, with or without scores in memory. Imports no torch.

A fused kernel (FlashAttention-2: Dao, 2023) skips what lies behind the diagonal, computes 2 products forward and 5 backward, among them the scores once
more. Without it every score is computed, masked, normalised and dropped out in memory (Korthikanti et al., 2022, section 4: what selective recomputation
drops).
"""

from typing import NamedTuple

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.training.efficiency import Efficiency
from tandem.estimate.training.products import product_seconds

SCORE_BYTES_FORWARD, SCORE_BYTES_BACKWARD = 9, 11
"""Bytes that the kernels between the two products move for a score in 16 bits: softmax reads and writes it; dropout reads it, writes it and its mask of a
byte; backward dropout reads a gradient and the mask and writes, softmax reads two and writes one."""


class Attention(NamedTuple):
    forward: float
    backward: float


def attention_seconds(
    hardware: Hardware, precision: str, sequences: int, queries: int, keys: int, window: int | None, heads: int, head_dim: int, fused: bool, given: Efficiency
) -> Attention:
    """Returns the seconds of one layer on one GPU: ``sequences`` of ``queries`` tokens that attend to ``keys`` (more than ``queries`` with context
    parallelism, whose ranks have equal parts of the triangle) in ``heads`` heads."""
    precision = "bf16" if precision == "fp8" else precision
    if not fused:
        return _unfused(hardware, precision, sequences, queries, keys, heads, head_dim, given)
    seen = keys / 2 if window is None or window >= keys else window - window * window / (2 * keys)
    flops = 4.0 * sequences * heads * queries * seen * head_dim
    rate = hardware.product_rate(precision) * head_dim / (head_dim + given.head_overhead)
    return Attention(flops / (rate * given.attention_forward) + given.kernel_s, 2.5 * flops / (rate * given.attention_backward) + 2 * given.kernel_s)


def _unfused(hardware: Hardware, precision: str, sequences: int, queries: int, keys: int, heads: int, head_dim: int, given: Efficiency) -> Attention:
    count, scores = sequences * heads, float(sequences * heads * queries * keys)
    products = product_seconds(hardware, precision, queries, keys, head_dim, given, count)
    products += product_seconds(hardware, precision, queries, head_dim, keys, given, count)
    memory = hardware.memory_bandwidth * given.memory
    return Attention(products + SCORE_BYTES_FORWARD * scores / memory, 2 * products + SCORE_BYTES_BACKWARD * scores / memory)
