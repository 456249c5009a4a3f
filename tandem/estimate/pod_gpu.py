"""Predicts the bytes of each GPU of a pod, which trainer and engine share. Imports no torch."""

from tandem.config.engine import EngineArgs
from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.gpu_bytes import PIECE_BYTES, PIECES_ON_GPU, frozen_bytes, gpu_training_bytes, state_bytes_on_gpu
from tandem.estimate.memory import PodMemory
from tandem.estimate.model_bytes import (
    DTYPE_BYTES,
    held_by_layer,
    held_parameters,
    kv_bytes_per_token,
    largest_layer_activation_bytes_per_token,
)
from tandem.layout.shapes import ModelShapes

ENGINE_CONTEXT_BYTES = 1 << 30
"""CUDA's context, libraries and graphs in the engine's process. An assumption, not measured; that of the trainer's process is left free by
``runtime.machine.gpus``."""
COMPUTE_DTYPE = {"bf16": "bfloat16", "fp16": "float16"}
"""The dtype of packed weights and of the cache under a ``trainer.precision`` of 16 bits."""
LOGITS_COPIES = 3
"""Copies in at least fp32 of the logits of the sequences that decode at once, while tokens are drawn."""


def predict_gpu(
    shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, engine: EngineArgs, *, tokens: int, kv_cache_tokens: int,
    reference: bool, precision: str = "fp32",
) -> PodMemory:
    """Returns the plan of GPU 0, which has rank 0 of trainer and engine; every other GPU has at most one rank of each and needs no more.

    ``tokens``: of the trainer's largest micro-batch. ``reference``: every rank holds its part of a frozen copy of the weights beside the actor.
    ``precision``: what the engine multiplies in."""
    frozen = frozen_bytes(shapes, trainer, parallel) if reference else 0
    stays = state_bytes_on_gpu(shapes, trainer, parallel, frozen) if trainer.sleep_offload == "none" else 0
    stays += PIECES_ON_GPU * PIECE_BYTES if trainer.offload != "none" else 0
    dtype, ranks = COMPUTE_DTYPE.get(precision, trainer.dtype), engine.tensor_parallel_size
    cache = kv_cache_tokens * kv_bytes_per_token(shapes, dtype, engine.kv_cache_dtype)
    shared = engine_weight_bytes(shapes, trainer.dtype, dtype) + cache + _engine_working_bytes(shapes, engine)
    return PodMemory(
        trainer=gpu_training_bytes(shapes, trainer, tokens, parallel) + frozen, trainer_idle=stays,
        rollout=ENGINE_CONTEXT_BYTES + shared // ranks,
    )  # fmt: skip


def engine_weight_bytes(shapes: ModelShapes, dtype: str, packed_dtype: str) -> int:
    """Returns the bytes of an engine's weights of ``dtype`` while they are updated: matrices and head packed in ``packed_dtype``, the embedding,
    norms and biases, and the plain matrices of one layer."""
    plain, packed, head = DTYPE_BYTES[dtype], DTYPE_BYTES[packed_dtype], shapes.vocab_size * shapes.hidden_size
    held = held_parameters(shapes)
    matrices = sum(count for count, is_matrix in held if is_matrix)
    rest = sum(count for count, is_matrix in held if not is_matrix)
    layer = max(sum(count for count, is_matrix in held_by_layer(shapes, index) if is_matrix) for index in range(shapes.num_hidden_layers))
    # A tied head is packed beside the embedding; one of its own is plain only until it is packed.
    return packed * (matrices + head) + plain * (rest + layer)


def cache_tokens_within(shapes: ModelShapes, engine: EngineArgs, dtype: str, gpu_bytes: int) -> int:
    """Returns how many tokens of KV cache fit, beside weights of ``dtype`` and activations, in the share ``gpu_memory_utilization`` of each GPU of an
    engine. ``gpu_bytes``: the memory of a GPU. 0 or less: none."""
    assert engine.gpu_memory_utilization is not None
    shared = engine_weight_bytes(shapes, dtype, dtype) + _engine_working_bytes(shapes, engine)
    left = int(engine.gpu_memory_utilization * gpu_bytes) - ENGINE_CONTEXT_BYTES - shared // engine.tensor_parallel_size
    return left * engine.tensor_parallel_size // kv_bytes_per_token(shapes, dtype, engine.kv_cache_dtype)


def _engine_working_bytes(shapes: ModelShapes, engine: EngineArgs) -> int:
    return engine.max_num_batched_tokens * largest_layer_activation_bytes_per_token(shapes) + LOGITS_COPIES * 4 * engine.max_num_seqs * shapes.vocab_size
