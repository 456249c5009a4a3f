"""A kind of GPU and its network, as the time and memory models need them. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of GPU in nodes of ``gpus_per_node``.

    ``peak_flops``: dense operations per second by precision (``fp32``, ``bf16``, ``fp16``, ``fp8``, ``int8``). ``memory_bytes``: of a GPU.
    ``memory_bandwidth``: bytes per second. ``multiprocessors``: streaming multiprocessors or compute units. ``link_bandwidth``: bytes per second of one
    GPU to the others of its node, in one direction (NVLink, Infinity Fabric, PCIe). ``network_bandwidth``: bytes per second of one GPU to other nodes, in
    one direction. ``price_per_hour``: of one GPU, in US dollars; 0: unknown. ``sources``: where each figure is published.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: float
    multiprocessors: int
    link_bandwidth: float
    network_bandwidth: float
    gpus_per_node: int = 8
    price_per_hour: float = 0.0
    sources: tuple[str, ...] = ()
