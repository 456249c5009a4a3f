"""Bytes of a training process and of its files, by optimizer, precision and offload. Imports no torch."""

from dataclasses import replace

from tandem.config.parallel import ParallelConfig
from tandem.config.pretrain import DataConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.model_bytes import (
    DTYPE_BYTES,
    activation_bytes_per_token,
    cut_by_zero,
    held_by_layer,
    held_outside_layers,
    held_parameters,
    largest_layer_activation_bytes_per_token,
    optimizer_bytes,
    trained_bytes,
    weight_bytes,
)
from tandem.layout.lm_head import logits_bytes, parallel_logits_bytes
from tandem.layout.shapes import ModelShapes

ONE_PROCESS = ParallelConfig()
STAGING_BYTES = 16 << 20
"""A pager's two buffers for two moments (``trainer.offload.pager``); those for weights and gradients take as much again."""
ACTIVATIONS_IN_FLIGHT_BYTES = 32 << 20
"""Offloaded activations being written, at most, and as many being prefetched (``trainer.offload.activations``)."""

SEQUENCE_BYTES, TOKEN_BYTES = 550, 100
"""Measured: a sequence that waits in a batch (views of its shard), and each token of the current batch (``TrainSequence`` and
``MicroBatch``)."""


def batch_bytes(data: DataConfig, parallel: ParallelConfig = ONE_PROCESS, each: int = 1) -> int:
    """Returns the resident bytes of one rank's batches: those read ahead, the one being read and the current one. ``each``: sequences that
    one of ``data.global_batch_size`` counts for."""
    sequences = each * -(-data.global_batch_size // parallel.data)
    return sequences * ((data.read_ahead + 2) * SEQUENCE_BYTES + data.sequence_length * TOKEN_BYTES)


def training_bytes(shapes: ModelShapes, trainer: TrainerConfig, tokens: int, parallel: ParallelConfig = ONE_PROCESS, attended: int = 0) -> int:
    """Returns the resident bytes of one process of the mesh in addition to those of any process: weights and gradients, the optimizer's
    state and working memory, and what a forward pass of ``tokens`` saves for its backward pass. ``attended``: as in ``saved_bytes``."""
    weights, replicas = weight_bytes(shapes, trainer.dtype, parallel.tensor), parallel.data * parallel.context
    if trainer.offload_parameters == "nvme":
        held = _paged_bytes(shapes, trainer, parallel)
    elif trainer.offload == "nvme":
        held = cut_by_zero(weights, 0, replicas, parallel.zero) // parallel.pipeline + STAGING_BYTES
    else:
        moments = state_bytes(shapes, trainer) // parallel.tensor
        gradients = trained_bytes(shapes, trainer.dtype, parallel.tensor)
        held = cut_by_zero(weights, moments, replicas, parallel.zero, gradients) // parallel.pipeline + working_bytes(shapes, trainer, parallel)
    # Emulated precision holds every rounded matrix until its backward pass.
    copies = weights // parallel.pipeline if trainer.precision != "fp32" else 0
    saved = waiting_passes(parallel) * saved_bytes(shapes, trainer, tokens, parallel, attended)
    if trainer.offload_activations == "nvme":
        # A layer's own weights are in memory while it computes, and in the backward pass as many gradients.
        at_work = 2 * tokens * largest_layer_activation_bytes_per_token(shapes) // token_sharing(parallel)
        saved = min(saved, 2 * ACTIVATIONS_IN_FLIGHT_BYTES + at_work)
    return held + copies + saved + head_bytes(shapes, tokens, parallel)


def head_bytes(shapes: ModelShapes, tokens: int, parallel: ParallelConfig = ONE_PROCESS) -> int:
    """Returns the bytes that one process of the mesh holds at most for the log-probabilities of a forward pass of ``tokens`` and their
    backward pass; 0 of a value head, which has a number for each token."""
    if not shapes.language_head:
        return 0
    rows, vocabulary = -(-tokens // parallel.context), shapes.vocab_size
    if parallel.tensor == 1:
        return logits_bytes(rows, vocabulary, shapes.hidden_size)
    if not parallel.deterministic:
        return parallel_logits_bytes(rows, -(-vocabulary // parallel.tensor))
    # Each rank takes some of the rows to the whole head, which is gathered for this, as is its gradient.
    gathered = 2 * 4 * vocabulary * shapes.hidden_size if tokens else 0
    return gathered + logits_bytes(-(-rows // parallel.tensor), vocabulary, shapes.hidden_size)


def saved_bytes(shapes: ModelShapes, trainer: TrainerConfig, tokens: int, parallel: ParallelConfig = ONE_PROCESS, attended: int = 0) -> int:
    """Returns the bytes that the layers of one process of the mesh save in one forward pass of ``tokens`` for its backward pass. ``attended``: with
    shared prompts, the lengths of the sequences with their prompts: attention has keys and values of each."""
    each = activation_bytes_per_token(shapes, trainer.recompute) + _rounded_bytes_per_token(shapes, trainer)
    layers = 1 if trainer.recompute == "full" else shapes.num_hidden_layers
    copied = attended * layers * gathered_bytes_per_token(shapes) // parallel.tensor
    return (tokens * each // token_sharing(parallel) + copied) // parallel.pipeline


def gathered_bytes_per_token(shapes: ModelShapes) -> int:
    """Returns the bytes of the keys and values that one layer copies for each token that a sequence with a shared prompt attends to, in fp32."""
    return 4 * 2 * shapes.key_value_size


def waiting_passes(parallel: ParallelConfig, stage: int = 0) -> int:
    """Returns the number of forward passes that await their backward pass at once on a rank of pipeline stage ``stage``, under 1F1B."""
    return parallel.pipeline - stage


def token_sharing(parallel: ParallelConfig) -> int:
    """Returns the number of ranks that share the tokens of a forward pass."""
    return parallel.context * (parallel.tensor if parallel.sequence_parallel else 1)


def _paged_bytes(shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig) -> int:
    """Returns the bytes of weights, gradients and moments if the layers' are in a file: parameters outside layers, the weights of two
    layers, the gradients of one layer being written, two more gradients, and the pager's buffers. Under ZeRO: this rank's part of the
    weights and gradients outside layers in addition to the whole ones, and the prefetched part of two layers and that of gradients being
    written."""
    layers = [held_by_layer(shapes, layer) for layer in range(shapes.num_hidden_layers)]
    largest = max(sum(count for count, _ in held) for held in layers)
    parameter = max(count for held in layers for count, _ in held)
    outside, replicas = 2 * sum(held_outside_layers(shapes)), parallel.data * parallel.context
    numbers = outside + 3 * largest + 2 * parameter
    if parallel.world > 1:
        # A layer's gradients have a second, contiguous copy while they are reduced.
        numbers = outside + outside // replicas + 4 * largest + 4 * largest // replicas
    return numbers // parallel.tensor * DTYPE_BYTES[trainer.dtype] + 2 * STAGING_BYTES


def state_bytes(shapes: ModelShapes, trainer: TrainerConfig) -> int:
    """Returns the bytes that the optimizer of one process holds in memory from one step to the next."""
    return STAGING_BYTES if trainer.offload == "nvme" else optimizer_bytes(shapes, trainer.optimizer, trainer.dtype)


def working_bytes(shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig = ONE_PROCESS) -> int:
    """Returns the bytes that the optimizer additionally needs in its step: one matrix at a time, which Muon has whole on every rank; if
    ZeRO shards its momentum, the directions of a layer too."""
    if trainer.offload == "nvme":
        return 0
    itemsize = DTYPE_BYTES[trainer.dtype]
    largest = itemsize * max(count for count, is_hidden in held_parameters(shapes) if is_hidden)
    if trainer.optimizer == "muon":
        layer = itemsize * max(sum(count for count, _ in held_by_layer(shapes, index)) for index in range(shapes.num_hidden_layers))
        return 4 * largest + (layer // parallel.tensor if parallel.zero else 0)
    return 3 * largest // parallel.tensor if trainer.optimizer == "adamw8bit" else 0


def checkpoint_bytes(shapes: ModelShapes, trainer: TrainerConfig) -> int:
    """Returns the bytes of one checkpoint: trained weights and the optimizer's state, without the tokenizer's files."""
    return trained_bytes(shapes, trainer.dtype) + optimizer_bytes(shapes, trainer.optimizer, trainer.dtype)


def offloaded_bytes(shapes: ModelShapes, trainer: TrainerConfig, tokens: int, parallel: ParallelConfig = ONE_PROCESS) -> int:
    """Returns the bytes of all ranks of one machine in ``trainer.offload_folder`` for a forward pass of ``tokens``: each rank's moments,
    and the staged copy of a checkpoint, which all ranks share; weights and gradients of the layers, and the copy from which a sharded model
    is exported; activations."""
    total, here, world = 0, parallel.ranks_of_a_node, parallel.world
    # Without ZeRO every rank that holds the same weights updates all of them.
    copies = 1 if parallel.zero else parallel.data * parallel.context
    if trainer.offload == "nvme":
        total += (copies * optimizer_bytes(shapes, trainer.optimizer, trainer.dtype) + checkpoint_bytes(shapes, trainer)) * here // world
    if trainer.offload_parameters == "nvme":
        layers = [held_by_layer(shapes, layer) for layer in range(shapes.num_hidden_layers)]
        total += 2 * DTYPE_BYTES[trainer.dtype] * sum(count for held in layers for count, _ in held) * here // world
        total += weight_bytes(shapes, trainer.dtype) if world > 1 else 0
    if trainer.offload_activations == "nvme":
        passes = sum(waiting_passes(parallel, stage) for stage in range(parallel.pipeline))
        total += passes * saved_bytes(shapes, trainer, tokens, parallel) * here // parallel.pipeline
    return total


def run_bytes_on_disk(shapes: ModelShapes, trainer: TrainerConfig, checkpoints_kept: int, models: int) -> int:
    """Returns the largest size of a run's files without what is offloaded: the checkpoints that are kept, one more while it is committed, and
    ``models``, initial and exported ones."""
    return (checkpoints_kept + 1) * checkpoint_bytes(shapes, trainer) + models * weight_bytes(replace(shapes, lora=None), trainer.dtype)


def _rounded_bytes_per_token(shapes: ModelShapes, trainer: TrainerConfig) -> int:
    """Returns the bytes per token of each linear layer's rounded input, which emulated precision saves in addition to fp32."""
    if trainer.precision == "fp32":
        return 0
    hidden, total = shapes.hidden_size, shapes.hidden_size
    for layer in range(shapes.num_hidden_layers):
        experts = shapes.experts_of(layer)
        if experts is None:
            inner = hidden + shapes.intermediate_size
        else:
            inner = experts.num_experts_per_tok * (hidden + experts.intermediate_size)
        total += hidden + shapes.query_size + inner
    return 4 * total
