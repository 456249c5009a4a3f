"""Bytes of GPU memory, and of host memory with it, that one training process needs. Imports no torch."""

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.model_bytes import cut_by_zero, optimizer_bytes, weight_bytes
from tandem.estimate.training_bytes import (
    ONE_PROCESS,
    checkpoint_bytes,
    gathered_bytes_per_token,
    saved_bytes,
    state_bytes,
    token_sharing,
    working_bytes,
)
from tandem.layout.lm_head import gpu_logits_bytes
from tandem.layout.shapes import ModelShapes

PIECE_BYTES = 16 << 20
"""One piece of one offloaded moment (``trainer.optimizers.adamw_host``)."""
PIECES_ON_GPU = 6


def gpu_training_bytes(shapes: ModelShapes, trainer: TrainerConfig, tokens: int, parallel: ParallelConfig = ONE_PROCESS, attended: int = 0) -> int:
    """Returns ``training_bytes`` for a process that computes on a GPU."""
    weights = weight_bytes(shapes, trainer.dtype, parallel.tensor)
    is_away = trainer.offload != "none"
    moments = 0 if is_away else state_bytes(shapes, trainer) // parallel.tensor
    at_work = PIECES_ON_GPU * PIECE_BYTES if is_away else working_bytes(shapes, trainer, parallel)
    held = cut_by_zero(weights, moments, parallel.data * parallel.context, parallel.zero)
    # Every matrix exists once more in 16 bits until its backward pass.
    copies = weights // 2 if trainer.precision != "fp32" else 0
    saved = gpu_saved_bytes(shapes, trainer, tokens)
    copied = attended * shapes.num_hidden_layers * gathered_bytes_per_token(shapes) // parallel.tensor
    logits = gpu_logits_bytes(tokens, shapes.vocab_size) if shapes.language_head else 0
    return (held + copies + copied) // parallel.pipeline + at_work + saved // token_sharing(parallel) + logits


def gpu_saved_bytes(shapes: ModelShapes, trainer: TrainerConfig, tokens: int) -> int:
    """Returns the bytes that the layers save for the backward pass: 16 bits per element, except for the residual stream (an upper bound for
    weights in 16 bits) and attention's log-sum-exp."""
    if trainer.multiplies_in == "fp32":
        return saved_bytes(shapes, trainer, tokens)
    hidden, layers = shapes.hidden_size, []
    for layer in range(shapes.num_hidden_layers):
        is_whole = trainer.recompute != "selective"
        halves = 2 * hidden + (2 if is_whole and shapes.qk_norm else 1) * shapes.qkv_size + shapes.query_size
        experts, kept = shapes.experts_of(layer), 3 if is_whole else 2
        if experts is None:
            halves += kept * shapes.intermediate_size
        else:
            halves += experts.num_experts_per_tok * (2 * hidden + kept * experts.intermediate_size)
        router = 0 if experts is None else 8 * experts.num_experts
        layers.append(2 * halves + 8 * hidden + 4 * shapes.num_attention_heads + router)
    ends = 6 * hidden
    return tokens * (ends + (6 * hidden * len(layers) + max(layers) if trainer.recompute == "full" else sum(layers)))


def host_bytes_beside_gpu(shapes: ModelShapes, trainer: TrainerConfig) -> int:
    """Returns the pinned memory of all ranks together: the staged copy of a checkpoint, and moments offloaded to the host."""
    return checkpoint_bytes(shapes, trainer) + (optimizer_bytes(shapes, trainer.optimizer, trainer.dtype) if trainer.offload == "cpu" else 0)


def frozen_bytes(shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig) -> int:
    """Returns the bytes of one rank's part of a frozen copy of the weights, such as the reference model."""
    replicas = parallel.data * parallel.context if parallel.zero == 3 else 1
    return weight_bytes(shapes, trainer.dtype) // (parallel.tensor * parallel.pipeline * replicas)
