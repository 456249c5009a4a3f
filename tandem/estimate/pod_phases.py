"""The memory of a pod on GPUs by phase, kind of memory and what holds it. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.memory import PodMemory
from tandem.estimate.model_bytes import optimizer_bytes
from tandem.estimate.pod_gpu import GpuParts
from tandem.estimate.resident_bytes import resident_bytes
from tandem.estimate.training_bytes import checkpoint_bytes
from tandem.layout.residents import Residency
from tandem.layout.shapes import ModelShapes

PodPhase = Literal["train", "offload", "convert", "rollout", "inference"]


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Bytes of one phase by what they hold: of the GPU that needs most (``device``), of the host's memory of a machine (``host``), and of its ``disk``.
    Phases follow one another: their bytes are never added."""

    phase: PodPhase
    device: Mapping[str, int]
    host: Mapping[str, int]
    disk: Mapping[str, int]


def pod_phases(parts: GpuParts, host: PodMemory, trainer_host: Mapping[str, int], disk: Mapping[str, int]) -> list[PhaseMemory]:
    """Returns the phases of a step in their order, without inference where nothing is inferred. ``host``: the totals of the same pod; ``trainer_host``:
    what is known of its trainer's part, whose rest are processes. ``disk``: what the run has there at most, which is the same in all phases."""
    pinned = {name: size for name, size in trainer_host.items() if size}

    def of(phase: PodPhase, trainer: Mapping[str, int], engine: Mapping[str, int], trainer_total: int, engine_total: int) -> PhaseMemory:
        # What is beside them is less the pages that ranks share with a server, so that it belongs to both.
        processes = trainer_total - sum(pinned.values()) + host.beside
        engines = engine_total - host.engines_share if engine_total else 0
        return PhaseMemory(phase, {**trainer, **engine}, {**pinned, "weight_buffers": host.segments, "processes": processes, "engines": engines}, dict(disk))

    idle = parts.engine_idle
    phases = [
        of("train", parts.train, idle, host.trainer, host.engine_idle),
        of("offload", parts.offload, idle, host.trainer, host.engine_idle),
        of("convert", parts.convert, idle, host.trainer, host.engine_idle),
        of("rollout", parts.idle, parts.engine, host.trainer_idle, host.rollout),
    ]
    return [*phases, of("inference", parts.inference, idle, host.inference, host.engine_idle)] if parts.inference else phases


def pinned_parts(
    shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, residency: Residency, *, reference: bool, critic: ModelShapes | None = None,
    reward_model: ModelShapes | None = None, follows: bool = False, teacher: ModelShapes | None = None, ranks: int = 0,
) -> dict[str, int]:
    """Returns the pinned bytes of a machine's ``ranks`` (0: all), of those that ``predict_beside_gpus`` counts of the trainer: residents that are moved to
    memory, the staged copy of a checkpoint, and moments that are offloaded there. Arguments as there."""
    held = resident_bytes(shapes, trainer, parallel, reference=reference, critic=critic, reward_model=reward_model, follows=follows, teacher=teacher)
    away = residency.saved(held) if residency.to == "memory" else frozenset()
    trained = [each for each in (shapes, critic) if each is not None]
    moments = sum(optimizer_bytes(each, trainer.optimizer, trainer.dtype) for each in trained) if trainer.offload == "cpu" else 0
    return {
        **{f"moved_{name}": (ranks or parallel.world) * held[name] for name in held if name in away},
        "checkpoint_copy": sum(checkpoint_bytes(each, trainer) for each in trained),
        "offloaded_moments": moments,
    }
