"""Seconds of collectives by the topology of a group. Imports no torch.

A ring moves the part (n - 1) / n of the data through every link (Thakur et al., 2005; NCCL's "bus bandwidth"); an all-reduce is a reduce-scatter and an
all-gather.
"""

import math

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.training.efficiency import Efficiency


def gather_seconds(hardware: Hardware, size: int, stride: int, moved: float, given: Efficiency) -> float:
    """Returns the seconds of an all-gather (or reduce-scatter) of ``moved`` bytes, all parts together, in a group of ``size`` GPUs, ``stride`` ranks apart."""
    if size == 1 or moved == 0:
        return 0.0
    return moved * (size - 1) / size / (hardware.group_bandwidth(size, stride) * given.links) + math.ceil(math.log2(size)) * given.latency_s


def all_to_all_seconds(hardware: Hardware, size: int, stride: int, moved: float, given: Efficiency) -> float:
    """Returns the seconds of an exchange in which each GPU sends ``moved`` bytes in equal parts to the ``size`` members of its group. What leaves the node goes
    through the GPU's own network card."""
    if size == 1 or moved == 0:
        return 0.0
    local = max(1, min(size, hardware.gpus_per_node // stride))
    within, beyond = moved * (local - 1) / size, moved * (size - local) / size
    seconds = max(within / hardware.link_bandwidth, beyond / hardware.network_bandwidth) / given.links
    return seconds + math.ceil(math.log2(size)) * given.latency_s


def send_seconds(hardware: Hardware, stride: int, moved: float, given: Efficiency) -> float:
    """Returns the seconds of sending ``moved`` bytes to the rank ``stride`` further."""
    return moved / (hardware.group_bandwidth(2, stride) * given.links) + given.latency_s
