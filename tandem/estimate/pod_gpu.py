"""Predicts the bytes of each GPU of a pod, which trainer and engine share. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from tandem.config.engine import EngineArgs
from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.count_bytes import running_state_bytes
from tandem.estimate.draft_bytes import DraftBytes
from tandem.estimate.memory import PodMemory
from tandem.estimate.model_bytes import (
    DTYPE_BYTES,
    cached_bytes_per_token,
    held_by_layer,
    held_outside_layers,
    held_parameters,
)
from tandem.estimate.resident_bytes import gradient_bytes, inference_bytes, resident_bytes
from tandem.estimate.training.layout import layout_of_trainer
from tandem.estimate.training.own_trainer import PIECES_BYTES, largest_layer_bytes_per_token
from tandem.estimate.training.rank_memory import RankMemory, predict_rank_memory
from tandem.layout.residents import KEEP, Phase, Residency
from tandem.layout.shapes import ModelShapes

ENGINE_CONTEXT_BYTES = 1 << 30
"""CUDA's context, libraries and graphs in the engine's process. An assumption, not measured; that of the trainer's process is left free by
``runtime.machine.gpus``."""
COMPUTE_DTYPE = {"bf16": "bfloat16", "fp16": "float16"}
"""The dtype of packed weights and of the cache under a ``trainer.precision`` of 16 bits."""
LOGITS_COPIES = 3
"""Copies in at least fp32 of the logits of the sequences that decode at once, while tokens are drawn."""


@dataclass(frozen=True, slots=True)
class GpuParts:
    """Bytes of GPU 0 by what they hold. Of the trainer: ``train``; ``offload``, when an update has ended and residents begin to move away; ``convert``, when
    they have moved and the actor is written to the weight buffers; ``idle``, during the rollout; ``inference`` (empty: there are no frozen models). Of the
    engine: ``engine``, while it generates, and ``engine_idle``, in the other phases."""

    train: Mapping[str, int]
    offload: Mapping[str, int]
    convert: Mapping[str, int]
    idle: Mapping[str, int]
    inference: Mapping[str, int]
    engine: Mapping[str, int]
    engine_idle: Mapping[str, int]

    @property
    def memory(self) -> PodMemory:
        """The totals."""
        return PodMemory(
            trainer=sum(self.train.values()), trainer_idle=sum(self.idle.values()), rollout=sum(self.engine.values()),
            inference=sum(self.inference.values()), engine_idle=sum(self.engine_idle.values()),
        )  # fmt: skip


def predict_gpu(
    shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, engine: EngineArgs, *, tokens: int, kv_cache_tokens: int,
    reference: bool, critic: ModelShapes | None = None, reward_model: ModelShapes | None = None, follows: bool = False, teacher: ModelShapes | None = None,
    precision: str = "fp32", residency: Residency = KEEP, attended: int = 0,
) -> GpuParts:
    """Returns the memory of GPU 0, which has rank 0 of trainer and engine; every other GPU has at most one rank of each and needs no more.

    ``tokens``: of the trainer's largest micro-batch. ``reference``: every rank holds its part of a copy of the weights beside the
    actor, which is frozen or ``follows`` it; ``critic``: and of a model of these shapes that is trained with it; ``reward_model``: and of a frozen
    one of these. ``attended``: as in ``TrainingLayout``. ``precision``: what the engine multiplies in. ``residency``: what is where when."""
    is_away = trainer.offload != "none"
    held = resident_bytes(
        shapes, trainer, parallel, reference=reference, critic=critic, reward_model=reward_model, moments=not is_away, follows=follows, teacher=teacher
    )

    def resting(phase: Phase, *others: str) -> dict[str, int]:
        """What is on the device in ``phase``, and ``others``, before anything is computed."""
        names = residency.on_device(phase, held) | set(others)
        return {name: size for name, size in held.items() if name in names} | ({"offload_buffers": PIECES_BYTES} if is_away else {})

    def update(trained: ModelShapes, *own: str, prefix: str = "") -> dict[str, int]:
        memory = predict_rank_memory(trained, layout_of_trainer(trainer, parallel, tokens, attended=attended, on_cpu=False))
        kinds = {f"{prefix}{each.name}": getattr(memory, each.name) for each in fields(RankMemory) if each.name != "context"}
        there = residency.on_device(Phase.TRAIN, held) - set(own)
        return kinds | {name: size for name, size in held.items() if name in there}

    training = update(shapes, "actor", "optimizer")
    if critic is not None:
        # The critic learns first; its gradients stay while the actor learns.
        training |= {"critic_gradients": gradient_bytes(critic, trainer, parallel)}
        training = max(update(critic, "critic", "critic_optimizer", prefix="critic_"), training, key=lambda parts: sum(parts.values()))
    # Passes without gradient share what sequences begin with, whatever the setting; attention then gathers up to the tokens of a pass.
    passes = inference_bytes((teacher or shapes if reference else None, critic, reward_model), tokens, parallel, attended or tokens)
    working = _engine_parts(shapes, trainer, engine, precision, kv_cache_tokens)
    asleep = {"engine_context": ENGINE_CONTEXT_BYTES, "engine_weights": DTYPE_BYTES[trainer.dtype] * sum(held_outside_layers(shapes))}
    return GpuParts(
        train=training,
        offload=resting(Phase.TRAIN),
        convert=resting(Phase.ROLLOUT, "actor"),
        idle=resting(Phase.ROLLOUT),
        inference=resting(Phase.INFERENCE) | {"inference": passes} if passes else {},
        engine=working,
        engine_idle={"stays": working, "sleeps": asleep, "ends": {}}[residency.rule.engine],
    )


def with_draft(parts: GpuParts, head: DraftBytes, engine: Mapping[str, int]) -> GpuParts:
    """Returns ``parts`` with a draft ``head`` that the trainer trains and keeps where it is, and with what the ``engine`` has of its draft on its first GPU,
    by what it holds. An engine that sleeps keeps the weights of its draft."""
    held = {"draft_head": head.held} if head.held else {}
    working = {"draft_activations": head.working} if head.working else {}
    idle = {name: size for name, size in engine.items() if "kv_cache" in parts.engine_idle or (parts.engine_idle and name == "draft_weights")}
    return GpuParts(
        train={**parts.train, **held, **working}, offload={**parts.offload, **held}, convert={**parts.convert, **held}, idle={**parts.idle, **held},
        inference={**parts.inference, **held} if parts.inference else {}, engine={**parts.engine, **engine}, engine_idle={**parts.engine_idle, **idle},
    )  # fmt: skip


def _engine_parts(shapes: ModelShapes, trainer: TrainerConfig, engine: EngineArgs, precision: str, kv_cache_tokens: int) -> dict[str, int]:
    """Returns what the engine has on a GPU while it generates."""
    dtype, ranks = COMPUTE_DTYPE.get(precision, trainer.dtype), engine.tensor_parallel_size
    weights = engine_weight_bytes(shapes, trainer.dtype, dtype)
    cache = kv_cache_tokens * _cached_bytes_per_token(shapes, dtype, engine)
    shared = (weights + cache + engine_working_bytes(shapes, engine)) // ranks
    parts = {"engine_context": ENGINE_CONTEXT_BYTES, "engine_weights": weights // ranks, "kv_cache": int(cache // ranks)}
    return parts | {"engine_activations": int(shared) - parts["engine_weights"] - parts["kv_cache"]}


def _cached_bytes_per_token(shapes: ModelShapes, dtype: str, engine: EngineArgs) -> int:
    """Returns the bytes that a token takes in the caches of all ranks, which all hold the compressed row of latent attention."""
    copies = 1 if shapes.latent is None else engine.tensor_parallel_size
    return copies * cached_bytes_per_token(shapes, dtype, engine.kv_cache_dtype, engine.finds_prefixes)


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


def cache_tokens_within(shapes: ModelShapes, engine: EngineArgs, dtype: str, gpu_bytes: int, draft_bytes: int = 0, draft_token_bytes: int = 0) -> int:
    """Returns how many tokens of KV cache fit, beside weights of ``dtype`` and activations, in the share ``gpu_memory_utilization`` of each GPU of an
    engine. ``gpu_bytes``: the memory of a GPU. ``draft_bytes``, ``draft_token_bytes``: of a draft's weights and of a token in its cache, on the first GPU. 0
    or less: none."""
    weights, token, ranks = engine_weight_bytes(shapes, dtype, dtype), _cached_bytes_per_token(shapes, dtype, engine), engine.tensor_parallel_size
    # The first GPU, which has all of the draft, decides.
    return cache_tokens_beside(weights + ranks * draft_bytes, token + ranks * draft_token_bytes, shapes, engine, gpu_bytes)


def cache_tokens_beside(weights: int, token_bytes: float, shapes: ModelShapes, engine: EngineArgs, gpu_bytes: int) -> int:
    """Returns ``cache_tokens_within`` beside ``weights`` bytes on all GPUs of an engine together, for tokens of ``token_bytes``."""
    assert engine.gpu_memory_utilization is not None
    shared = weights + engine_working_bytes(shapes, engine)
    left = int(engine.gpu_memory_utilization * gpu_bytes) - ENGINE_CONTEXT_BYTES - shared // engine.tensor_parallel_size
    return int(left * engine.tensor_parallel_size // token_bytes)


def engine_working_bytes(shapes: ModelShapes, engine: EngineArgs) -> int:
    """Returns the bytes of the activations of a step with all its tokens, of the logits, and of the states of linear attention, on all ranks together."""
    tokens = engine.max_num_batched_tokens * largest_layer_bytes_per_token(shapes)
    return tokens + engine.max_num_seqs * LOGITS_COPIES * 4 * shapes.vocab_size + running_state_bytes(shapes, engine)
