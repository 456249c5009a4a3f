"""A kind of GPU and its network, as the time and memory models need them. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

PRODUCT_SHARE = 0.8
"""The share of the peak rate that the largest products reach on hardware without published products: the mean of the NVIDIA GPUs with a measured
figure (A100 0.87, H100 0.80, H200 0.79 in bf16, H100 0.71 in fp8)."""
HOST_BANDWIDTH, DISK_BANDWIDTH = 25e9, 0.8e9
"""Of hardware files without them: copies of pinned memory over PCIe 4 x16, and one of four NVMe disks shared by eight GPUs."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of GPU in nodes of ``gpus_per_node``.

    ``peak_flops``: dense operations per second by precision (``fp32``, ``bf16``, ``fp16``, ``fp8``, ``int8``). ``product_flops``: the most that a large
    matrix product was measured to reach, by precision (``product_rate``). ``memory_bytes``: of a GPU.
    ``memory_bandwidth``: bytes per second. ``multiprocessors``: streaming multiprocessors or compute units. ``link_bandwidth``: bytes per second of one
    GPU to the others of its node, in one direction (NVLink, Infinity Fabric, PCIe). ``network_bandwidth``: bytes per second of one GPU to other nodes, in
    one direction. ``host_bandwidth``: bytes per second of one GPU to the memory of its host, in one direction. ``disk_bandwidth``: bytes per second that
    one GPU's share of the node's local disks writes. ``price_per_hour``: of one GPU, in US dollars; 0: unknown. ``device_names``: substrings of
    the names by which torch knows the device. ``sources``: where each figure is published.
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
    product_flops: Mapping[str, float] = field(default_factory=dict)
    host_bandwidth: float = HOST_BANDWIDTH
    disk_bandwidth: float = DISK_BANDWIDTH
    device_names: tuple[str, ...] = ()

    def product_rate(self, precision: str) -> float:
        """Returns the operations per second of the largest matrix products in ``precision``: measured, or at the share of their peak that bf16 reaches
        here, or ``PRODUCT_SHARE`` of it."""
        if precision in self.product_flops:
            return self.product_flops[precision]
        share = self.product_flops["bf16"] / self.peak_flops["bf16"] if "bf16" in self.product_flops else PRODUCT_SHARE
        return self.peak_flops[precision] * share

    def group_bandwidth(self, size: int, stride: int) -> float:
        """Returns the bytes per second in one direction at which a GPU takes part in a collective of ``size`` GPUs that are ``stride`` ranks apart: its
        links within a node; beyond it the network cards of all members in its node, which a collective uses together."""
        if size * stride <= self.gpus_per_node:
            return self.link_bandwidth
        return min(self.link_bandwidth, max(1, min(size, self.gpus_per_node // stride)) * self.network_bandwidth)
