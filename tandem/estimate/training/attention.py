"""Seconds of causal attention: its two products, with or without scores in memory. Imports no torch.

A fused kernel (FlashAttention-2: Dao, 2023) skips what lies behind the diagonal, computes 2 products forward and 5 backward, among them the scores once
more. Its rates are measured ones, of the hardware file: for heads of 128 elements and long sequences. Without it every score is computed, masked, normalised
and dropped out in memory (Korthikanti et al., 2022, section 4: what selective recomputation drops).
"""

from typing import Literal, NamedTuple

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.training.efficiency import Efficiency
from tandem.estimate.training.products import product_seconds

Kernel = Literal["fused", "flash2", "flash1", "unfused"]
"""``fused``: the fastest of the GPU (cuDNN or FlashAttention-3 on Hopper). ``flash2``, ``flash1``: that generation of FlashAttention, whose instructions are
those of Ampere."""
FLASH1_SHARE = (0.76, 0.61)
"""Of the rate of FlashAttention-2, forward and backward, that FlashAttention reaches with long sequences: 50 % and 35 % of an A100's peak, the upper ends of
what Dao (2023, section 1) gives, against 66 % and 57 % under a causal mask."""
FUSED_SHARE = (0.68, 0.65)
"""Of the product rate, where a hardware file has no rates of attention: cuDNN's on an H100."""
MEASURED_HEAD, HEAD_OVERHEAD = 128, 32
"""Elements of the heads whose rate is measured; smaller ones take as long as if they had that many more (Shah et al., 2024, figures 5 and 6: heads of 64 reach
69 to 90 % of the rate of 128)."""
DIAGONAL_TOKENS = 300
"""Keys of a sequence that pass without result: tiles that the diagonal cuts and the first of each pipeline. At 512, 1,024 and 2,048 tokens cuDNN and
FlashAttention-2 reach 0.58, 0.77 and 0.89 of their rate at 16,384 (Shah et al., 2024, figure 5e), here 0.63, 0.77 and 0.87."""
SCORE_BYTES_FORWARD, SCORE_BYTES_BACKWARD = 9, 11
"""Bytes that the kernels between the two products move for a score in 16 bits: softmax reads and writes it; dropout reads it, writes it and its mask of a
byte; backward dropout reads a gradient and the mask and writes, softmax reads two and writes one."""


class Attention(NamedTuple):
    forward: float
    backward: float


def kernel_rates(hardware: Hardware, kernel: Kernel, precision: str) -> tuple[float, float]:
    """Returns the operations per second of a fused ``kernel`` forward and backward, with heads of ``MEASURED_HEAD`` elements and long sequences."""
    measured = hardware.attention_flops
    if precision == "fp32" or not measured:
        rate = hardware.product_rate(precision)
        fused = rate * FUSED_SHARE[0], rate * FUSED_SHARE[1]
    else:
        fused = measured["forward"], measured["backward"]
    if kernel == "fused":
        return fused
    flash2 = measured.get("flash2_forward", fused[0]), measured.get("flash2_backward", fused[1])
    shares = FLASH1_SHARE if kernel == "flash1" else (1.0, 1.0)
    return flash2[0] * shares[0], flash2[1] * shares[1]


def attention_seconds(
    hardware: Hardware, precision: str, sequences: int, queries: int, keys: int, window: int | None, heads: int, head_dim: int, kernel: Kernel,
    given: Efficiency,
) -> Attention:
    """Returns the seconds of one layer on one GPU: ``sequences`` of ``queries`` tokens that attend to ``keys`` (more than ``queries`` with context
    parallelism, whose ranks have equal parts of the triangle) in ``heads`` heads."""
    precision = "bf16" if precision == "fp8" else precision
    if kernel == "unfused":
        return _unfused(hardware, precision, sequences, queries, keys, heads, head_dim, given)
    seen = keys / 2 if window is None or window >= keys else window - window * window / (2 * keys)
    flops = 4.0 * sequences * heads * queries * (seen + DIAGONAL_TOKENS / 2) * head_dim
    of_heads = head_dim / (head_dim + HEAD_OVERHEAD) * (MEASURED_HEAD + HEAD_OVERHEAD) / MEASURED_HEAD
    forward, backward = kernel_rates(hardware, kernel, precision)
    # In a training step its clock is that of the products.
    forward, backward = forward * of_heads * given.products, backward * of_heads * given.products
    return Attention(flops / forward + given.kernel_s, 2.5 * flops / backward + 2 * given.kernel_s)


def _unfused(hardware: Hardware, precision: str, sequences: int, queries: int, keys: int, heads: int, head_dim: int, given: Efficiency) -> Attention:
    count, scores = sequences * heads, float(sequences * heads * queries * keys)
    products = product_seconds(hardware, precision, queries, keys, head_dim, given, count)
    products += product_seconds(hardware, precision, queries, head_dim, keys, given, count)
    memory = hardware.memory_bandwidth * given.memory
    return Attention(products + SCORE_BYTES_FORWARD * scores / memory, 2 * products + SCORE_BYTES_BACKWARD * scores / memory)
