"""Seconds of gradients and parameters between data-parallel ranks, and of the optimizer. Imports no torch.

Gradients are summed in fp32, parameters gathered in the precision of the products (Rajbhandari et al., 2020, section 7: stage 1 and 2 move as much as an
all-reduce, stage 3 half as much again, for each micro-batch).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.training.collectives import gather_seconds
from tandem.estimate.training.efficiency import Efficiency
from tandem.estimate.training.layout import TrainingLayout

GRADIENT_BYTES = 4
ADAM_BYTES = 34
"""Of a parameter: the gradient is read for its norm and for the update; master weight and two moments are read and written; the rounded weight is written."""
OFFLOADED_BYTES = {"down": 4, "up": 2}
"""Of a parameter, between GPU and host: its gradient down, its rounded weight up."""
STATE_BYTES = 12
"""Of a parameter: master weight and two moments."""
HOST_MEMORY_BANDWIDTH = 400e9
"""Bytes per second of a node's memory (two sockets of eight channels of DDR5-4800: 614 GB/s; two thirds of it in Adam on the host: Rajbhandari et al.,
2021)."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The parameters of a rank that ``size`` ranks, ``stride`` apart, have as well."""

    parameters: float
    size: int
    stride: int


def exchange_seconds(hardware: Hardware, layout: TrainingLayout, shared: Sequence[Shared], forward_s: float, backward_s: float, given: Efficiency) -> float:
    """Returns the exposed seconds of a step. ``forward_s`` and ``backward_s``: of one micro-batch through the rank, which hide what is gathered before and
    summed after."""
    weight_bytes = 1 if layout.precision == "fp8" and layout.parallel.zero == 3 else 4 if layout.precision == "fp32" else 2
    summed = sum(gather_seconds(hardware, each.size, each.stride, GRADIENT_BYTES * each.parameters, given) for each in shared)
    gathered = sum(gather_seconds(hardware, each.size, each.stride, weight_bytes * each.parameters, given) for each in shared)
    if layout.parallel.zero == 0:
        return _exposed(2 * summed, backward_s, given)
    if layout.parallel.zero == 3 and layout.reshard_after_forward:
        return layout.micro_batches * (_exposed(gathered, forward_s, given) + _exposed(gathered + summed, backward_s, given))
    sums = layout.micro_batches if layout.parallel.zero == 2 else 1
    return sums * _exposed(summed, backward_s, given) + _exposed(gathered, forward_s, given)


def _exposed(seconds: float, hidden_by: float, given: Efficiency) -> float:
    return max(0.0, seconds - hidden_by) + given.contention * min(seconds, hidden_by)


def optimizer_seconds(hardware: Hardware, layout: TrainingLayout, shared: Sequence[Shared], given: Efficiency) -> float:
    """Returns the seconds of AdamW on a rank's parameters, or its share of them from ZeRO 1 on, with the transfers of an offloaded state."""
    parameters = sum(each.parameters / (each.size if layout.parallel.zero else 1) for each in shared)
    if layout.offload == "none":
        return ADAM_BYTES * parameters / (hardware.memory_bandwidth * given.memory)
    moved = max(OFFLOADED_BYTES.values()) * parameters / hardware.host_bandwidth
    updated = ADAM_BYTES * parameters / (HOST_MEMORY_BANDWIDTH / hardware.gpus_per_node)
    if layout.offload == "cpu":
        return moved + updated
    return moved + max(updated, 2 * STATE_BYTES * parameters / hardware.disk_bandwidth)
