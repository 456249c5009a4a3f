"""VRAM management: which models of a pod are in memory during which phase.

``plan`` decides before anything starts whether the engine may stay in memory while the trainer trains; the trainer's worker asks
``release`` when it goes offline, so that the memory of its gradients really goes back to the machine.
"""

import ctypes
import gc
import logging

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.machine import MachineConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.rollout import RolloutConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.memory import PodMemory, predict, sleep_mode
from tandem.estimate.training_bytes import SEQUENCE_BYTES, TOKEN_BYTES
from tandem.layout.shapes import ModelShapes
from tandem.runtime.machine.available_memory import available_bytes
from tandem.types import RunError

logger = logging.getLogger(__name__)


def kv_cache_tokens(rollout: RolloutConfig, group_size: int, max_length: int) -> int:
    """Returns the tokens of the KV cache: as configured, or what the sequences that run at once can fill."""
    engine = rollout.engine
    if engine.kv_cache_tokens:
        return engine.kv_cache_tokens
    sequences = rollout.prompts_per_step * group_size
    return min(engine.max_num_seqs, max(sequences, 1)) * (max_length + 16)


def plan(
    rollout: RolloutConfig, algorithm: AlgorithmConfig, trainer: TrainerConfig, parallel: ParallelConfig, machine: MachineConfig,
    shapes: ModelShapes, max_length: int,
) -> tuple[PodMemory, str]:
    """Returns the predicted bytes of every phase, over all ranks, and ``keep`` or ``terminate``. Raises ``RunError`` where not even taking turns fits."""
    engine = rollout.engine
    engine.check_length(max_length)
    sequences = rollout.prompts_per_step * algorithm.group_size
    available, batch = available_bytes(machine.memory_gib), sequences * (SEQUENCE_BYTES + rollout.max_tokens * TOKEN_BYTES)
    if batch > available:
        raise RunError(
            f"the samples of one step need {batch / 2**30:.2f} GiB and {available / 2**30:.2f} GiB are available; lower rollout.prompts_per_step or "
            "rollout.max_tokens"
        )
    memory = predict(
        shapes,
        trainer,
        parallel,
        # A sequence longer than micro_batch_tokens is a micro-batch by itself.
        tokens=min(max(trainer.micro_batch_tokens, max_length), sequences * max_length),
        kv_cache_tokens=kv_cache_tokens(rollout, algorithm.group_size, max_length),
        kv_cache_dtype=engine.kv_cache_dtype,
        swap_bytes=int(engine.swap_space * 2**30),
        engine_ranks=engine.tensor_parallel_size,
        reference=algorithm.kl_coef > 0,
    )
    if memory.largest_phase > available:
        raise RunError(
            f"this run needs {memory.largest_phase / 2**30:.2f} GiB at its worst moment and may take {available / 2**30:.2f}; "
            "lower rollout.engine.kv_cache_tokens or trainer.micro_batch_tokens, set trainer.sleep_offload to nvme, or raise machine.memory_gib"
        )
    chosen = rollout.sleep_mode
    return memory, sleep_mode(memory, available) if chosen == "auto" else chosen


def release() -> None:
    """Give freed memory back to the machine: Python's garbage first, then the C library's free lists."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        logger.debug("no malloc_trim on this C library; freed memory stays with the process")
