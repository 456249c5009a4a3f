"""Predicts the bytes of each GPU of a pod, which trainer and engine share. Imports no torch."""

from tandem.config.engine import EngineArgs
from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.memory import PodMemory
from tandem.estimate.model_bytes import (
    DTYPE_BYTES,
    held_by_layer,
    held_outside_layers,
    held_parameters,
    kv_bytes_per_token,
)
from tandem.estimate.resident_bytes import gradient_bytes, inference_bytes, resident_bytes
from tandem.estimate.training.layout import layout_of_trainer
from tandem.estimate.training.own_trainer import PIECES_BYTES, largest_layer_bytes_per_token
from tandem.estimate.training.rank_memory import predict_rank_memory
from tandem.layout.residents import KEEP, Phase, Residency
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
    reference: bool, critic: ModelShapes | None = None, reward_model: ModelShapes | None = None, follows: bool = False, teacher: ModelShapes | None = None,
    precision: str = "fp32", residency: Residency = KEEP, attended: int = 0,
) -> PodMemory:
    """Returns the memory of GPU 0, which has rank 0 of trainer and engine; every other GPU has at most one rank of each and needs no more.

    ``tokens``: of the trainer's largest micro-batch. ``reference``: every rank holds its part of a copy of the weights beside the
    actor, which is frozen or ``follows`` it; ``critic``: and of a model of these shapes that is trained with it; ``reward_model``: and of a frozen
    one of these. ``attended``: as in ``TrainingLayout``. ``precision``: what the engine multiplies in. ``residency``: what is where when."""
    is_away = trainer.offload != "none"
    held = resident_bytes(
        shapes, trainer, parallel, reference=reference, critic=critic, reward_model=reward_model, moments=not is_away, follows=follows, teacher=teacher
    )
    pieces = PIECES_BYTES if is_away else 0

    def on_device(phase: Phase) -> int:
        return sum(held[name] for name in residency.on_device(phase, held)) + pieces

    dtype, ranks = COMPUTE_DTYPE.get(precision, trainer.dtype), engine.tensor_parallel_size
    cache = kv_cache_tokens * kv_bytes_per_token(shapes, dtype, engine.kv_cache_dtype)
    shared = engine_weight_bytes(shapes, trainer.dtype, dtype) + cache + engine_working_bytes(shapes, engine)
    working = ENGINE_CONTEXT_BYTES + shared // ranks
    asleep = ENGINE_CONTEXT_BYTES + DTYPE_BYTES[trainer.dtype] * sum(held_outside_layers(shapes))
    there = residency.on_device(Phase.TRAIN, held)

    def update(trained: ModelShapes, *own: str) -> int:
        layout = layout_of_trainer(trainer, parallel, tokens, attended=attended, on_cpu=False)
        return predict_rank_memory(trained, layout).allocated + sum(held[name] for name in there - set(own))

    training = update(shapes, "actor", "optimizer")
    if critic is not None:
        # The critic learns first; its gradients stay while the actor learns.
        training = max(update(critic, "critic", "critic_optimizer"), training + gradient_bytes(critic, trainer, parallel))
    passes = inference_bytes((teacher or shapes if reference else None, critic, reward_model), tokens, parallel, attended)
    return PodMemory(
        trainer=training,
        trainer_idle=on_device(Phase.ROLLOUT),
        rollout=working,
        inference=on_device(Phase.INFERENCE) + passes if passes else 0,
        engine_idle={"stays": working, "sleeps": asleep, "ends": 0}[residency.rule.engine],
    )


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
    weights, token = engine_weight_bytes(shapes, dtype, dtype), kv_bytes_per_token(shapes, dtype, engine.kv_cache_dtype)
    return cache_tokens_beside(weights, token, shapes, engine, gpu_bytes)


def cache_tokens_beside(weights: int, token_bytes: float, shapes: ModelShapes, engine: EngineArgs, gpu_bytes: int) -> int:
    """Returns ``cache_tokens_within`` beside ``weights`` bytes on all GPUs of an engine together, for tokens of ``token_bytes``."""
    assert engine.gpu_memory_utilization is not None
    shared = weights + engine_working_bytes(shapes, engine)
    left = int(engine.gpu_memory_utilization * gpu_bytes) - ENGINE_CONTEXT_BYTES - shared // engine.tensor_parallel_size
    return int(left * engine.tensor_parallel_size // token_bytes)


def engine_working_bytes(shapes: ModelShapes, engine: EngineArgs) -> int:
    """Returns the bytes of the activations of a step with all its tokens, and of the logits, on all ranks together."""
    return engine.max_num_batched_tokens * largest_layer_bytes_per_token(shapes) + LOGITS_COPIES * 4 * engine.max_num_seqs * shapes.vocab_size
