"""Predicts the bytes of every phase of a pod before anything is started. Imports no torch.

The run measures the same phases, and the report shows both figures side by side.
"""

from dataclasses import dataclass

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.gpu_bytes import frozen_bytes, host_bytes_beside_gpu, state_bytes_on_gpu
from tandem.estimate.model_bytes import kv_bytes_per_token, weight_bytes
from tandem.estimate.peak_bytes import KEPT_SHARE, peak_bytes, process_bytes, staging_bytes
from tandem.estimate.training_bytes import rank_state_bytes, state_bytes
from tandem.layout.shapes import ModelShapes
from tandem.types.kv_cache import KVCacheDtype

PROCESS_BYTES = 260 * 2**20
"""Resident bytes of a process that has imported torch and done nothing (measured: 230 to 270 MiB, torch 2.13 CPU)."""


@dataclass(frozen=True, slots=True)
class PodMemory:
    """Predicted bytes of each phase: resident bytes summed over the processes of a sidecar, or those of a GPU. ``trainer``: while it trains;
    ``trainer_idle``: offloaded; ``rollout``: while it generates; ``segments``: the two shared weight buffers, which the others do not count."""

    trainer: int
    trainer_idle: int
    rollout: int
    segments: int = 0

    @property
    def together(self) -> int:
        """Bytes when the engine stays in memory while the trainer trains."""
        return max(self.trainer, self.trainer_idle) + self.rollout + self.segments

    @property
    def largest_phase(self) -> int:
        """Bytes at the worst moment when the engine's process ends before the trainer trains."""
        return max(self.trainer, self.trainer_idle + self.rollout) + self.segments

    def needed(self, sleep_mode: str) -> int:
        """Returns the bytes at the worst moment where the engine ``keep``s its memory between steps, or its process ``terminate``s."""
        return self.together if sleep_mode == "keep" else self.largest_phase


def predict(
    shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, *, tokens: int, kv_cache_tokens: int, reference: bool,
    kv_cache_dtype: KVCacheDtype = "auto", swap_bytes: int = 0, engine_ranks: int = 1, engines: int = 1,
) -> PodMemory:
    """Returns the plan of one pod on the CPUs of one machine.

    ``tokens``: of the largest micro-batch. ``reference``: every rank holds its part of a frozen copy of the weights beside the actor. ``swap_bytes``:
    an engine's swap space. ``engine_ranks``: its tensor-parallel processes, which divide weights and cache. ``engines``: rollout workers, of which each has
    ``kv_cache_tokens``."""
    weights = weight_bytes(shapes, trainer.dtype)
    frozen = frozen_bytes(shapes, trainer, parallel) if reference else 0
    training = peak_bytes(shapes, trainer, tokens, parallel) + frozen
    kv_cache_bytes = kv_cache_tokens * kv_bytes_per_token(shapes, trainer.dtype, kv_cache_dtype)
    return PodMemory(
        trainer=parallel.world * training,
        trainer_idle=parallel.world * _idle_bytes(shapes, trainer, parallel, frozen),
        rollout=engines * (engine_ranks * PROCESS_BYTES + 2 * weights + kv_cache_bytes + swap_bytes),
        segments=2 * weights,
    )


def predict_beside_gpus(
    shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, *, reference: bool, swap_bytes: int = 0, engine_ranks: int = 1,
    engines: int = 1,
) -> PodMemory:
    """Returns the plan of the host memory of a pod on GPUs: processes, what is staged and pinned, and the segments. Arguments as in ``predict``."""
    weights, frozen = weight_bytes(shapes, trainer.dtype), frozen_bytes(shapes, trainer, parallel) if reference else 0
    # Pinned memory is kept for the next rollout.
    asleep = state_bytes_on_gpu(shapes, trainer, parallel, frozen) if trainer.sleep_offload == "cpu" else 0
    training = parallel.world * (process_bytes(trainer) + asleep) + host_bytes_beside_gpu(shapes, trainer)
    return PodMemory(
        trainer=training, trainer_idle=training, rollout=engines * (engine_ranks * PROCESS_BYTES + weights + swap_bytes), segments=2 * weights
    )


def fits_together(plan: PodMemory, available_bytes: int) -> bool:
    """Returns whether trainer and engine fit together in ``available_bytes``."""
    return plan.together <= available_bytes


def sleeping_bytes(shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, *, reference: bool) -> int:
    """Returns the bytes that all ranks have in files while the engine works. ``reference``: as in ``predict``."""
    frozen = frozen_bytes(shapes, trainer, parallel) if reference else 0
    return parallel.world * rank_state_bytes(shapes, trainer, parallel, state_bytes(shapes, trainer), frozen) if trainer.sleep_offload == "nvme" else 0


def _idle_bytes(shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, frozen: int) -> int:
    """Returns the bytes of one rank while the engine works: weights, moments and the frozen copy, unless they are in a file, and the staged copy of
    a checkpoint. Gradients are dropped."""
    held = 0 if trainer.sleep_offload == "nvme" else rank_state_bytes(shapes, trainer, parallel, state_bytes(shapes, trainer), frozen)
    return process_bytes(trainer) + int((1 + KEPT_SHARE) * held) + staging_bytes(shapes, trainer, parallel)
