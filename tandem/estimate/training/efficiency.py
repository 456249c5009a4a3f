"""The physical constants of the time model: shares of published rates that kernels and networks reach. They hold for every model and GPU;
``benchmarks/planner_errors.py`` fits them on a part of the published measurements and tests them on the rest. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Efficiency:
    """``products``: share of the fastest measured product that a product of the same shape reaches in a training step, whose power and caches other kernels
    share, and of the measured rate of attention. ``tile_s``: seconds of the prologue and epilogue of a tile, in which its multiprocessor does not multiply.
    ``memory``: share of the memory bandwidth of elementwise kernels. ``links``: share of the bandwidth of links and network of large
    collectives; ``latency_s``: of a message. ``kernel_s``: from one kernel to the next. ``contention``: share of hidden communication by which it slows the
    kernels that hide it."""

    products: float = 0.88
    tile_s: float = 4.2e-6
    memory: float = 0.677
    links: float = 0.86
    latency_s: float = 5e-6
    kernel_s: float = 3e-6
    contention: float = 0.4


FITTED = Efficiency()
