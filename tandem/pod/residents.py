"""Memory management of a pod: which models are in memory during which phase.

``plan`` decides before anything starts whether the engine may stay in memory while the trainer trains.
"""

from dataclasses import dataclass

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.machine import MachineConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.rollout import RolloutConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.memory import PodMemory, fits_together, predict, predict_beside_gpus
from tandem.estimate.pod_gpu import predict_gpu
from tandem.estimate.training_bytes import SEQUENCE_BYTES, TOKEN_BYTES
from tandem.layout.shapes import ModelShapes
from tandem.runtime.machine.available_memory import available_bytes
from tandem.runtime.machine.gpus import check_gpu_memory, describe_gpus, least_room, pod_device
from tandem.types import RunError

GPU_FIX = (
    "lower rollout.engine.kv_cache_tokens or trainer.micro_batch_tokens, set trainer.sleep_offload to cpu, trainer.recompute to full or "
    "rollout.sleep_mode to terminate, or shard the model with section 'parallel'"
)


@dataclass(frozen=True, slots=True)
class PodPlan:
    """Predicted bytes of host memory, and of the GPU that needs most (``None``: the pod is on the CPU), of which there are ``gpus``;
    ``sleep_mode``: ``keep`` or ``terminate``."""

    host: PodMemory
    gpu: PodMemory | None
    gpus: int
    sleep_mode: str

    def describe_gpus(self) -> list[str]:
        """Returns lines on the GPUs; none on the CPU."""
        gpu = self.gpu
        if gpu is None:
            return []
        parts = {"trainer": gpu.trainer, "trainer during the rollout": gpu.trainer_idle, "rollout": gpu.rollout}
        return [
            describe_gpus(self.gpus, gpu.needed(self.sleep_mode)),
            "of them: " + ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in parts.items()),
        ]


def kv_cache_tokens(rollout: RolloutConfig, algorithm: AlgorithmConfig, max_length: int) -> int:
    """Returns the tokens of the KV cache of one worker: as configured, or what the sequences that run at once can fill."""
    engine = rollout.engine
    if engine.kv_cache_tokens:
        return engine.kv_cache_tokens
    sequences = -(-algorithm.prompts_per_round(rollout.prompts_per_step) // rollout.workers) * algorithm.group_size
    return min(engine.max_num_seqs, max(sequences, 1)) * (max_length + 16)


def largest_micro_batch(rollout: RolloutConfig, algorithm: AlgorithmConfig, trainer: TrainerConfig, max_length: int) -> int:
    """Returns the tokens of the largest micro-batch of sequences of at most ``max_length`` tokens, of which one longer than
    ``micro_batch_tokens`` is a micro-batch by itself."""
    return min(max(trainer.micro_batch_tokens, max_length), rollout.prompts_per_step * algorithm.group_size * max_length)


def plan(
    rollout: RolloutConfig, algorithm: AlgorithmConfig, trainer: TrainerConfig, parallel: ParallelConfig, machine: MachineConfig,
    shapes: ModelShapes, max_length: int, rollout_precision: str,
) -> PodPlan:
    """Returns the predicted bytes of every phase, over all ranks, and whether the engine stays. ``rollout_precision``: what the engine
    multiplies in. Raises ``RunError`` where not even taking turns fits."""
    engine = rollout.engine
    engine.check_length(max_length)
    sequences = algorithm.rounds * algorithm.prompts_per_round(rollout.prompts_per_step) * algorithm.group_size
    available, batch = available_bytes(machine.memory_gib), sequences * (SEQUENCE_BYTES + rollout.max_tokens * TOKEN_BYTES)
    if batch > available:
        raise RunError(
            f"the samples of one step need {batch / 2**30:.2f} GiB and {available / 2**30:.2f} GiB are available; lower rollout.prompts_per_step or "
            "rollout.max_tokens"
        )
    tokens = largest_micro_batch(rollout, algorithm, trainer, max_length)
    cache_tokens, reference = kv_cache_tokens(rollout, algorithm, max_length), algorithm.kl_coef > 0
    gpu = None
    if pod_device(machine) == "cpu":
        host = predict(
            shapes, trainer, parallel, tokens=tokens, kv_cache_tokens=cache_tokens, kv_cache_dtype=engine.kv_cache_dtype,
            swap_bytes=int(engine.swap_space * 2**30), engine_ranks=engine.tensor_parallel_size, engines=rollout.workers, reference=reference,
        )  # fmt: skip
    else:
        host = predict_beside_gpus(
            shapes, trainer, parallel, reference=reference, swap_bytes=int(engine.swap_space * 2**30), engine_ranks=engine.tensor_parallel_size,
            engines=rollout.workers,
        )  # fmt: skip
        gpu = predict_gpu(shapes, trainer, parallel, engine, tokens=tokens, kv_cache_tokens=cache_tokens, reference=reference, precision=rollout_precision)
    if host.largest_phase > available:
        raise RunError(
            f"this run needs {host.largest_phase / 2**30:.2f} GiB at its worst moment and may take {available / 2**30:.2f}; "
            f"lower {'rollout.workers, ' if rollout.workers > 1 else ''}rollout.engine.kv_cache_tokens or trainer.micro_batch_tokens, set "
            "trainer.sleep_offload to nvme, or raise machine.memory_gib"
        )
    gpus = max(parallel.world, rollout.engine_ranks)
    mode: str = rollout.sleep_mode
    if mode == "auto":
        fits = fits_together(host, available) and (gpu is None or fits_together(gpu, least_room(gpus)))
        mode = "keep" if fits else "terminate"
    if gpu is not None:
        check_gpu_memory(gpu.needed(mode), gpus, GPU_FIX)
    return PodPlan(host, gpu, gpus, mode)
