"""Seconds of gradients and parameters between data-parallel ranks, and of the optimizer. Imports no torch.

Gradients are summed in fp32 or 16 bits, parameters gathered in the precision of the products (Rajbhandari et al., 2020, section 7: stage 1 and 2 move as
much as an all-reduce, stage 3 half as much again, for each micro-batch).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.training.collectives import gather_seconds
from tandem.estimate.training.efficiency import Efficiency
from tandem.estimate.training.layout import TrainingLayout

ADAM_BYTES = 34
"""Of a parameter: the gradient is read for its norm and for the update; master weight and two moments are read and written; the rounded weight is written."""
OFFLOADED_BYTES = {"down": 4, "up": 2}
"""Of a parameter, between GPU and host: its gradient down, its rounded weight up."""
READ_GRADIENT_BYTES = 2
"""Of a gradient with ZeRO 3, which is copied into one buffer, in the precision of the sum, before it is reduced, as the parts of a weight are read and
written once more after they are gathered (PyTorch, ``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``)."""
BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_RANK = 40_000_000, 1_000_000
"""Parameters of a collective with ZeRO 0 to 2: Megatron-Core's ``bucket_size``, at least a million a rank."""
MOMENT_BYTES = 8
"""Of a parameter: both moments, which Tandem's own trainer streams through the GPU, where it updates (``trainer.optimizers.adamw_host``)."""
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


def exchange_seconds(
    hardware: Hardware, layout: TrainingLayout, shared: Sequence[Shared], layers: int, forward_s: float, backward_s: float, given: Efficiency
) -> float:
    """Returns the exposed seconds of a step. ``layers``: of the rank, which ZeRO 3 gathers and reduces one after the other. ``forward_s`` and
    ``backward_s``: of one micro-batch through the rank, which hide what is gathered before and summed after."""
    weight_bytes = 1 if layout.precision == "fp8" and layout.parallel.zero == 3 else 4 if layout.precision == "fp32" else 2

    def exposed(bytes_each: int, hidden_by: float, times: int = 1) -> float:
        return _exposed(hardware, layout, shared, layers, bytes_each, hidden_by, times, given)

    gradient_bytes = layout.gradient_bytes
    if layout.parallel.zero == 0:
        return exposed(gradient_bytes, backward_s, 2)
    gathered = exposed(weight_bytes, forward_s)
    if layout.parallel.zero == 3 and layout.reshard_after_forward:
        copied = sum(each.parameters for each in shared if each.size > 1) / (hardware.memory_bandwidth * given.memory)
        gathering = gathered + exposed(weight_bytes, backward_s) + 2 * 2 * weight_bytes * copied
        reducing = gathered + exposed(weight_bytes + gradient_bytes, backward_s) + (2 * 2 * weight_bytes + READ_GRADIENT_BYTES + gradient_bytes) * copied
        sums = layout.micro_batches if layout.reduces_each_pass else 1
        return (layout.micro_batches - sums) * gathering + sums * reducing
    sums = layout.micro_batches if layout.parallel.zero == 2 else 1
    return sums * exposed(gradient_bytes, backward_s) + gathered


def _exposed(
    hardware: Hardware, layout: TrainingLayout, shared: Sequence[Shared], layers: int, bytes_each: int, hidden_by: float, times: int, given: Efficiency
) -> float:
    """Returns the exposed seconds of gathering or summing all ``shared`` parameters, part by part, ``times`` times: what the first part waits for, or waits for
    the last, has nothing to hide behind."""
    alone, rest = 0.0, 0.0
    for each in shared:
        parts = layers if layout.parallel.zero == 3 else max(1, round(each.parameters / max(BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_RANK * each.size)))
        seconds = times * gather_seconds(hardware, each.size, each.stride, bytes_each * each.parameters, given, parts)
        alone, rest = alone + seconds / parts, rest + seconds * (1 - 1 / parts)
    return alone + hidden_seconds(rest, hidden_by, given)


def hidden_seconds(seconds: float, hidden_by: float, given: Efficiency) -> float:
    """Returns what communication of ``seconds`` adds to kernels of ``hidden_by`` seconds beside it: what is longer than they are, and a share of the rest, by
    which it slows them."""
    return max(0.0, seconds - hidden_by) + given.contention * min(seconds, hidden_by)


def optimizer_seconds(hardware: Hardware, layout: TrainingLayout, shared: Sequence[Shared], given: Efficiency) -> float:
    """Returns the seconds of AdamW on a rank's parameters, or its share of them from ZeRO 1 on, with the transfers of an offloaded state."""
    parameters = sum(each.parameters / (each.size if layout.parallel.zero else 1) for each in shared)
    on_gpu = ADAM_BYTES * parameters / (hardware.memory_bandwidth * given.memory)
    if layout.offload == "none":
        return on_gpu
    if layout.trainer is not None and not layout.on_cpu:
        # Pieces come and go at the same time, PCIe's directions being apart.
        streamed = max(on_gpu, MOMENT_BYTES * parameters / hardware.host_bandwidth)
        return streamed if layout.offload == "cpu" else max(streamed, 2 * MOMENT_BYTES * parameters / hardware.disk_bandwidth)
    moved = max(OFFLOADED_BYTES.values()) * parameters / hardware.host_bandwidth
    updated = ADAM_BYTES * parameters / (HOST_MEMORY_BANDWIDTH / hardware.gpus_per_node)
    if layout.offload == "cpu":
        return moved + updated
    return moved + max(updated, 2 * STATE_BYTES * parameters / hardware.disk_bandwidth)
