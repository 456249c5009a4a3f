"""The decision tree of memory, and what each strategy costs: computed for the model at hand. Imports no torch.

A model that fits with everything on every GPU is trained with data parallelism and ZeRO 1. One that needs up to 4 times a GPU takes ZeRO 2 and recomputation
(also below 2 times, where the tree of the literature says nothing); up to 10 times, ZeRO 3; more, ZeRO 3 with the optimizer's state in host memory, or more
GPUs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tandem.config.parallel import ParallelConfig
from tandem.estimate.training.held_parameters import held_on_span
from tandem.estimate.training.layout import TrainingLayout
from tandem.estimate.training.predict import predict_step_time
from tandem.estimate.training.rank_memory import predict_rank_memory
from tandem.layout.pipeline_stages import whole
from tandem.planner.request import SAFE_SHARE, PlanRequest

BUS_BYTES = 4
"""Of a parameter, what crosses to the host in a step, the fp32 gradient; the 16-bit weight comes back at the same time, the other way."""
NVME_BYTES = 24
"""Of a parameter, what the disk reads and writes in a step: its state, both ways."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to save memory with data parallelism alone. ``memory_bytes``: of a GPU. ``saved``: the share of the memory without it. ``compute_overhead`` and
    ``communication_bytes``: the share of operations computed again, and what a GPU sends in a step. ``step_seconds``: predicted, with the transfers of an
    offload that nothing hides."""

    name: str
    layout: TrainingLayout
    memory_bytes: int
    saved: float
    compute_overhead: float
    communication_bytes: float
    offload_seconds: float
    step_seconds: float


@dataclass(frozen=True, slots=True)
class MemoryAdvice:
    """``ratio``: the memory that data parallelism alone needs over that of the GPU. ``strategy``: the answer of the tree;
    ``reason``: in a sentence. ``fastest``: of the strategies that fit in fact, ``None`` if data parallelism alone never does."""

    ratio: float
    strategy: str
    reason: str
    strategies: tuple[Strategy, ...]
    fastest: Strategy | None


def memory_advice(request: PlanRequest) -> MemoryAdvice:
    """Returns the answer of the decision tree, and all strategies for comparison."""
    strategies = tuple(_strategies(request))
    needed, available = strategies[0].memory_bytes, request.hardware.memory_bytes
    ratio = needed / available
    name, why = branch(ratio)
    if request.gpus == 1 and ratio <= 1:
        why = "it fits; with one GPU there is nothing to shard"
    reason = f"data parallelism alone needs {needed / 2**30:.1f} GiB, {ratio:.1f} times a GPU's {available / 2**30:.1f} GiB: {why}"
    fitting = [each for each in strategies if each.memory_bytes <= SAFE_SHARE * available]
    return MemoryAdvice(ratio, name, reason, strategies, min(fitting, key=lambda each: each.step_seconds, default=None))


def branch(ratio: float) -> tuple[str, str]:
    """Returns the strategy for a model that needs ``ratio`` times the memory of a GPU, and why."""
    if ratio <= 1:
        return "ZeRO 1", "it fits, and ZeRO 1 frees memory at no further communication"
    if ratio <= 4:
        return "ZeRO 2 and recomputation", "sharded gradients and recomputed layers take the least time of what is enough"
    if ratio <= 10:
        return "ZeRO 3", "the weights must be sharded too, at half as much communication again"
    return "ZeRO 3 with offload", "no sharding over these GPUs alone is enough: the optimizer's state goes to the host, or take more GPUs"


def _strategies(request: PlanRequest) -> Iterator[Strategy]:
    shapes, hardware = request.shapes, request.hardware
    data = request.gpus
    while request.global_batch % data:
        data -= 1
    base = request.completed(TrainingLayout(ParallelConfig(data=data), request.sequence, request.global_batch, 1, request.precision, "none"))
    without = predict_rank_memory(shapes, base).total
    plain = predict_step_time(shapes, base, hardware)
    count = held_on_span(shapes, whole(shapes.num_hidden_layers), 1, 1).total
    for name, zero, recompute, offload in (
        ("data parallelism alone", 0, "none", "none"), ("ZeRO 1", 1, "none", "none"), ("ZeRO 2", 2, "none", "none"), ("ZeRO 3", 3, "none", "none"),
        ("recomputation", 0, "full", "none"), ("ZeRO 2 and recomputation", 2, "full", "none"), ("ZeRO 3 and recomputation", 3, "full", "none"),
        ("ZeRO 3 with offload to the host", 3, "full", "cpu"), ("ZeRO 3 with offload to NVMe", 3, "full", "nvme"),
    ):  # fmt: skip
        parallel = replace(base.parallel, zero=zero if data > 1 else 0)  # type: ignore[arg-type]
        layout = request.completed(replace(base, parallel=parallel, recompute=recompute, offload=offload))  # type: ignore[arg-type]
        time, memory = predict_step_time(shapes, layout, hardware), predict_rank_memory(shapes, layout).total
        moved = offload_seconds(count / data, offload, hardware.host_bandwidth, hardware.disk_bandwidth)  # type: ignore[arg-type]
        yield Strategy(
            name, layout, memory, 1 - memory / without, time.recomputed / (plain.products + plain.attention + plain.memory_bound),
            communication_bytes(count, data, zero, 2 if request.precision != "fp32" else 4), moved, time.seconds,
        )  # fmt: skip


def communication_bytes(parameters: int, ranks: int, zero: int, each: int) -> float:
    """Returns what a data-parallel rank sends in a step of one pass: gradients are reduced and scattered (fp32, as in Megatron-Core and FSDP), weights are
    gathered once, with ZeRO 3 twice (Rajbhandari et al., 2020, section 7); without ZeRO the summed gradients are gathered instead."""
    share = (ranks - 1) / ranks * parameters
    return share * (4 + (4 if zero == 0 else 2 * each if zero == 3 else each))


def offload_seconds(parameters: float, offload: Literal["none", "cpu", "nvme"], host_bandwidth: float, disk_bandwidth: float) -> float:
    """Returns the seconds of the transfers of a GPU's ``parameters`` in a step: over the bus one way and back at once, and with ``nvme`` to the disk."""
    seconds = BUS_BYTES * parameters / host_bandwidth if offload != "none" else 0.0
    return seconds + (NVME_BYTES * parameters / disk_bandwidth if offload == "nvme" else 0.0)
