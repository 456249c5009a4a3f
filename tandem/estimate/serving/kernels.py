"""What the kernels of an engine reach of its GPU: those of published engines, and of Tandem's own. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineKernels:
    """``bandwidth`` and ``cache``: shares of the memory bandwidth at which weights, and keys and values of decoding sequences, are read. ``prompts``: share of
    the product rate of matrix products of many rows, ``attention``: of attention over whole prompts. ``start_s``: seconds from one kernel to the next in a
    CUDA graph."""

    bandwidth: float
    cache: float
    prompts: float
    attention: float
    start_s: float


PUBLISHED, TANDEM = "published", "tandem"
KERNELS: Mapping[str, EngineKernels] = {
    PUBLISHED: EngineKernels(bandwidth=0.85, cache=0.85, prompts=1.0, attention=0.55, start_s=4e-6),
    TANDEM: EngineKernels(bandwidth=0.85, cache=0.57, prompts=0.46, attention=0.25, start_s=4.9e-6),
}
"""``published``: 0.85 is what STREAM and copies reach on HBM; 4 us: about 1.5 between two kernels, and until memory or tensor cores are busy and again idle at
a kernel's ends; FlashAttention 2 and 3 reach 0.50 to 0.75 of the product rate. ``tandem``: its batch-invariant kernels in bf16 on an H200, by a model of 0.6B
(``benchmarks/results/engine-gpu-2026-11-27.md``): ``start_s`` from a step of one sequence, ``cache`` from one of 64, ``prompts`` and ``attention``, by one
factor, from a prompt of 8,192 tokens. A step of an 8B, measured there too, is within 3 % with them."""
