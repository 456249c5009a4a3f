"""A kind of GPU and its network, as the time and memory models need them. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from tandem.types.errors import UserError

PRODUCT_SHARE = 0.8
"""The share of the peak rate that the largest products reach on hardware without published products: the mean of the NVIDIA GPUs with a measured
figure (A100 0.87, H100 and H200 0.80, B200 0.78 in bf16)."""
HOST_BANDWIDTH, DISK_BANDWIDTH = 25e9, 0.8e9
"""Of hardware files without them: copies of pinned memory over PCIe 4 x16, and one of four NVMe disks shared by eight GPUs."""
FIGURES = (
    "peak_flops", "product_flops", "attention_flops", "memory_bytes", "memory_bandwidth", "multiprocessors", "link_bandwidth", "network_bandwidth",
    "host_bandwidth", "disk_bandwidth", "price_per_hour",
)  # fmt: skip
"""The fields whose value is published or measured, so that a file that sets one names its source."""
PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "int8")
ATTENTION = ("forward", "backward", "flash2_forward", "flash2_backward")


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of GPU in nodes of ``gpus_per_node``: the content of a hardware file.

    ``peak_flops``: dense operations per second by precision (``fp32``, ``bf16``, ``fp16``, ``fp8``, ``int8``). ``product_flops``: the most that a large
    matrix product was measured to reach, by precision (``product_rate``). ``attention_flops``: what fused attention in 16 bits was measured to reach with heads
    of 128 elements and long causal sequences, ``forward`` and ``backward``, and where FlashAttention-2 is slower ``flash2_forward`` and ``flash2_backward``.
    ``memory_bytes``: of a GPU.
    ``memory_bandwidth``: bytes per second. ``multiprocessors``: streaming multiprocessors or compute units. ``link_bandwidth``: bytes per second of one
    GPU to the others of its node, in one direction (NVLink, Infinity Fabric, PCIe). ``is_meshed``: each pair of a node's GPUs has links of its own, an equal
    part of that, instead of a switch between all. ``network_bandwidth``: bytes per second of one GPU to other nodes, in
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
    is_meshed: bool = False
    price_per_hour: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)
    product_flops: Mapping[str, float] = field(default_factory=dict)
    attention_flops: Mapping[str, float] = field(default_factory=dict)
    host_bandwidth: float = HOST_BANDWIDTH
    disk_bandwidth: float = DISK_BANDWIDTH
    device_names: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises ``UserError`` for a figure that no machine has, or that has no source."""
        kinds = {"peak_flops": (PRECISIONS, "a precision"), "product_flops": (PRECISIONS, "a precision"), "attention_flops": (ATTENTION, "a pass")}
        for each, (names, kind) in kinds.items():
            for name, rate in getattr(self, each).items():
                if name not in names:
                    raise UserError(f"'{each}.{name}' is not {kind}; known here: {', '.join(names)}")
                _check_positive(f"{each}.{name}", rate)
        if "bf16" not in self.peak_flops:
            raise UserError("'peak_flops.bf16' is missing; the products of a training step are counted against it")
        for precision, rate in self.product_flops.items():
            peak = self.peak_flops.get(precision, 0.0)
            if rate > peak:
                raise UserError(f"'product_flops.{precision}' is {rate:g}, more than peak_flops.{precision} {peak:g}; a product is not faster")
        for name in ("forward", "backward"):
            if self.attention_flops and name not in self.attention_flops:
                raise UserError(f"'attention_flops.{name}' is missing; give both passes or neither")
        for each in (*FIGURES[3:-1], "gpus_per_node"):
            _check_positive(each, getattr(self, each))
        if self.price_per_hour < 0:
            raise UserError(f"'price_per_hour' is {self.price_per_hour:g}; it must be 0 (unknown) or more")
        defaults = {each.name: each.default for each in fields(self)}
        for each in FIGURES:
            if getattr(self, each) != defaults[each] and getattr(self, each) and each not in self.sources:
                raise UserError(f"'sources.{each}' is missing; name where the figure is published or how it was measured")
        for each in self.sources:
            if each not in FIGURES:
                raise UserError(f"'sources.{each}' is the source of no figure; known here: {', '.join(FIGURES)}")

    def product_rate(self, precision: str) -> float:
        """Returns the operations per second of the largest matrix products in ``precision``: measured, or at the share of their peak that bf16 reaches
        here, or ``PRODUCT_SHARE`` of it. Products in int8, which none has published, reach the share of those in fp8: both move a byte an operand, and their
        peaks are the same."""
        if precision in self.product_flops:
            return self.product_flops[precision]
        like = "fp8" if precision == "int8" and "fp8" in self.product_flops else "bf16"
        share = self.product_flops[like] / self.peak_flops[like] if like in self.product_flops else PRODUCT_SHARE
        return self.peak_flops[precision] * share

    def group_bandwidth(self, size: int, stride: int) -> float:
        """Returns the bytes per second in one direction at which a GPU takes part in a collective of ``size`` GPUs that are ``stride`` ranks apart: its
        links within a node; beyond it the network cards of all members in its node, which a collective uses together."""
        if size * stride <= self.gpus_per_node:
            return self.bandwidth_within(size)
        members = max(1, min(size, self.gpus_per_node // stride))
        return min(self.bandwidth_within(members) if members > 1 else self.link_bandwidth, members * self.network_bandwidth)

    def bandwidth_within(self, members: int) -> float:
        """Returns the bytes per second in one direction between a GPU and the others of ``members`` GPUs of its node: without a switch, over the links to
        these alone."""
        return self.link_bandwidth * (members - 1) / (self.gpus_per_node - 1) if self.is_meshed and self.gpus_per_node > 1 else self.link_bandwidth


def _check_positive(name: str, value: float) -> None:
    if not value > 0 or math.isinf(value):
        raise UserError(f"'{name}' is {value:g}; it must be more than 0")
