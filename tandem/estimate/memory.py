"""Predict the bytes of every phase of a pod before anything is started. Imports no torch.

The run measures the same phases and the report shows both figures side by side.
"""

from dataclasses import dataclass

from tandem.estimate.model_bytes import activation_bytes_per_token, kv_bytes_per_token, optimizer_bytes, weight_bytes
from tandem.layout.shapes import ModelShapes
from tandem.types.kv_cache import KVCacheDtype

PROCESS_BYTES = 260 * 2**20
"""Resident bytes of a worker that has imported torch and done nothing (measured: 230 to 270 MiB, torch 2.13 CPU)."""


@dataclass(frozen=True, slots=True)
class PodMemory:
    """Predicted resident bytes. ``trainer``: while it trains; ``trainer_idle``: offloaded; ``rollout``: while it
    generates; ``segments``: the two shared weight buffers."""

    trainer: int
    trainer_idle: int
    rollout: int
    segments: int

    @property
    def together(self) -> int:
        """Bytes when the engine stays in memory while the trainer trains."""
        return max(self.trainer, self.trainer_idle) + self.rollout + self.segments

    @property
    def largest_phase(self) -> int:
        """Bytes at the worst moment when the engine's process ends before the trainer trains."""
        return max(self.trainer, self.trainer_idle + self.rollout) + self.segments


def predict(
    shapes: ModelShapes, *, dtype: str, micro_batch_tokens: int, batch_tokens: int, kv_cache_tokens: int, reference: bool,
    kv_cache_dtype: KVCacheDtype = "auto", optimizer: str = "adamw", recompute: str = "none", swap_bytes: int = 0,
    engine_ranks: int = 1, sleep_offload: str = "none",
) -> PodMemory:
    """The plan for one pod on one device.

    ``micro_batch_tokens`` bounds what a forward saves for its backward under ``recompute``, ``batch_tokens`` (if smaller) is all there is.
    ``swap_bytes``: the engine's swap space. ``engine_ranks``: its tensor-parallel processes, which divide weights and cache.
    ``sleep_offload``: ``trainer.sleep_offload``; with ``nvme`` the trainer's state is in a file while the engine works.
    ``optimizer``: ``trainer.optimizer``. ``reference``: a frozen copy of the weights stands beside the actor.
    """
    weights = weight_bytes(shapes, dtype)
    moments = optimizer_bytes(shapes, optimizer)
    held = weights + moments + (weights if reference else 0)
    tokens = min(micro_batch_tokens, batch_tokens)
    working = weights + tokens * activation_bytes_per_token(shapes, recompute)
    return PodMemory(
        trainer=PROCESS_BYTES + held + working,
        trainer_idle=PROCESS_BYTES + (0 if sleep_offload == "nvme" else held),
        rollout=engine_ranks * PROCESS_BYTES + 2 * weights + kv_cache_tokens * kv_bytes_per_token(shapes, dtype, kv_cache_dtype) + swap_bytes,
        segments=2 * weights,
    )


def sleep_mode(plan: PodMemory, available_bytes: int) -> str:
    """``keep`` where trainer and engine fit together in ``available_bytes``, else ``terminate``."""
    return "keep" if plan.together <= available_bytes else "terminate"
