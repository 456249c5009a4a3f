"""The physical constants of the time model: shares of published rates that kernels and networks reach. They hold for every model and GPU;
``benchmarks/planner_errors.py`` fits them on a part of the published measurements and tests them on the rest. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Efficiency:
    """``products``: share of the fastest measured product that a product of the same shape reaches in a training step, whose power and caches other kernels
    share. ``tile_s``: seconds of the prologue and epilogue of a tile, in which its multiprocessor does not multiply. ``attention_forward``,
    ``attention_backward``: share of the product rate of fused attention, for infinite heads; ``head_overhead``: it takes as long as if heads had that many
    elements more. ``memory``: share of the memory bandwidth of elementwise kernels. ``links``: share of the bandwidth of links and network of large
    collectives; ``latency_s``: of each doubling of a group. ``kernel_s``: from one kernel to the next. ``tensor_exposed``: share of the communication of
    tensor-parallel ranks that products do not hide. ``contention``: share of hidden communication by which it slows the kernels that hide it."""

    products: float = 0.84
    tile_s: float = 4.8e-6
    attention_forward: float = 0.6
    attention_backward: float = 0.5
    head_overhead: float = 32.0
    memory: float = 0.65
    links: float = 0.92
    latency_s: float = 5e-6
    kernel_s: float = 3e-6
    tensor_exposed: float = 0.3
    contention: float = 0.4


FITTED = Efficiency()
