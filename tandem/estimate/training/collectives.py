"""Seconds of collectives by the topology of a group. Imports no torch.

A ring moves the part (n - 1) / n of the data through every link (Thakur et al., 2005; NCCL's "bus bandwidth"); an all-reduce is a reduce-scatter and an
all-gather. Each of its n - 1 steps takes a latency, that of the network from node to node. The figures are those of NCCL's own model, from which it chooses a
protocol (github.com/NVIDIA/nccl, src/graph/tuning.cc, ``baseLat`` and ``hwLat``).
"""

import math
from typing import NamedTuple

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.training.efficiency import Efficiency


class Protocol(NamedTuple):
    """Seconds before a ring starts, and of a step over NVLink, over PCIe and over the network; the share of the bandwidth that it leaves for data."""

    base_s: float
    link_s: float
    pcie_s: float
    network_s: float
    share: float


PROTOCOLS = (Protocol(8.4e-6, 3.4e-6, 5.7e-6, 9.6e-6, 1.0), Protocol(10e-6, 1.9e-6, 2.5e-6, 4.0e-6, 120 / 128))
"""NCCL's Simple and LL128, which carries a flag of 8 bytes beside 120 of data. The faster one is chosen."""
SLOWEST_NVLINK = 1e11
"""Bytes per second from which links within a node are NVLink (or Infinity Fabric), not PCIe."""
NVLINK_SHARE = 370 / 450
"""Of the line rate that carries data: the headers of NVLink's packets take about a fifth (github.com/NVIDIA/nccl-tests/issues/212, an author of NCCL)."""


def gather_seconds(hardware: Hardware, size: int, stride: int, moved: float, given: Efficiency, times: int = 1) -> float:
    """Returns the seconds of an all-gather (or reduce-scatter) of ``moved`` bytes, all parts together, in a group of ``size`` GPUs, ``stride`` ranks apart, in
    ``times`` collectives one after the other."""
    if size == 1 or moved == 0:
        return 0.0
    bandwidth = _data_bandwidth(hardware, size, stride, given)
    nodes = -(-size // max(1, hardware.gpus_per_node // stride))
    sent = moved * (size - 1) / size / bandwidth

    def seconds(protocol: Protocol) -> float:
        within = protocol.link_s if hardware.link_bandwidth >= SLOWEST_NVLINK else protocol.pcie_s
        return times * (protocol.base_s + (size - nodes) * within + (nodes - 1) * protocol.network_s) + sent / protocol.share

    return min(map(seconds, PROTOCOLS))


def all_to_all_seconds(
    hardware: Hardware, size: int, stride: int, moved: float, given: Efficiency, copies: int = 1, *, once: bool = False
) -> float:
    """Returns the seconds of an exchange in which each GPU sends ``copies`` of ``moved`` bytes to members of its group of ``size`` by chance. What leaves the
    node goes through the GPU's own network card. ``once``: what several copies of an element share is sent to a node one time and from there to each of its
    GPUs one time (DeepSeek-AI, 2025, DeepEP); of c copies by chance, n (1 - (1 - 1 / n)^c) of n nodes or GPUs have at least one."""
    if size == 1 or moved == 0:
        return 0.0
    local = max(1, min(size, hardware.gpus_per_node // stride))
    nodes = size / local
    if once:
        within = moved * (size - nodes) * _with_one(size, copies)
        beyond = moved * (nodes - 1) * _with_one(nodes, copies)
    else:
        within, beyond = copies * moved * (local - 1) / size, copies * moved * (size - local) / size
    seconds = max(within / link_data_bandwidth(hardware, local, given), beyond / (hardware.network_bandwidth * given.links))
    return seconds + math.ceil(math.log2(size)) * given.latency_s


def _with_one(places: float, copies: int) -> float:
    """Returns the chance that one of ``places`` has at least one of ``copies``."""
    return 1 - (1 - 1 / places) ** copies


def send_seconds(hardware: Hardware, stride: int, moved: float, given: Efficiency) -> float:
    """Returns the seconds of sending ``moved`` bytes to the rank ``stride`` further."""
    return moved / _data_bandwidth(hardware, 2, stride, given) + given.latency_s


def link_data_bandwidth(hardware: Hardware, members: int, given: Efficiency) -> float:
    """Returns the bytes of data per second of a GPU to the others of ``members`` GPUs of its node, in one direction."""
    share = NVLINK_SHARE if hardware.link_bandwidth >= SLOWEST_NVLINK else given.links
    return (hardware.bandwidth_within(members) if members > 1 else hardware.link_bandwidth) * share


def _data_bandwidth(hardware: Hardware, size: int, stride: int, given: Efficiency) -> float:
    """Returns the bytes of data per second at which a GPU takes part in a collective: over its links, and beyond its node over the network cards of the
    group."""
    local = max(1, min(size, hardware.gpus_per_node // stride))
    links = link_data_bandwidth(hardware, local, given)
    return links if size * stride <= hardware.gpus_per_node else min(links, hardware.group_bandwidth(size, stride) * given.links)
