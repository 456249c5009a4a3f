"""The seconds of a training step on GPUs. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step of the slowest rank, which add up to ``seconds``: products, attention, memory-bound operations, recomputation, communication
    that nothing hides (by ``tensor``, ``data``, ``pipeline``, ``expert`` and ``context`` group), the bubble of the pipeline, the optimizer. ``host``: that
    GPUs wait for kernels which their host has not started yet."""

    products: float
    attention: float
    memory_bound: float
    recomputed: float
    tensor_communication: float
    data_communication: float
    pipeline_communication: float
    expert_communication: float
    context_communication: float
    bubble: float
    optimizer: float
    host: float = 0.0

    @property
    def seconds(self) -> float:
        return float(sum(getattr(self, name) for name in self.__slots__))
