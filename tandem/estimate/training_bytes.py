"""Bytes of a training process and of what it writes, by optimizer, precision and offload. Imports no torch."""

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
    weight_bytes,
)
from tandem.layout.shapes import ModelShapes

ONE_PROCESS = ParallelConfig()
KEPT_LOGITS_BYTES = 4 << 25
"""Of the head's logits at most so many are kept for the backward pass (``kernels.cpu.autograd``)."""
STAGING_BYTES = 16 << 20
"""Of a pager's two buffers for two moments (``trainer.pager``); those for weights and gradients beside them take as much again."""
ACTIVATIONS_IN_FLIGHT_BYTES = 32 << 20
"""Of offloaded activations so many are at most on their way to the file, and as many on their way back (``trainer.offload.activations``)."""

SEQUENCE_BYTES, TOKEN_BYTES = 550, 100
"""Measured: a sequence that waits in a batch (views of its shard), and each token of the batch at work (``TrainSequence`` and ``MicroBatch``)."""


def batch_bytes(data: DataConfig, parallel: ParallelConfig = ONE_PROCESS) -> int:
    """Resident bytes of one rank's batches: those that are read ahead, the one that is being read and the one at work."""
    sequences = -(-data.global_batch_size // parallel.data)
    return sequences * ((data.read_ahead + 2) * SEQUENCE_BYTES + data.sequence_length * TOKEN_BYTES)


def training_bytes(shapes: ModelShapes, trainer: TrainerConfig, tokens: int, parallel: ParallelConfig = ONE_PROCESS) -> int:
    """Resident bytes of one process of the mesh besides what any process takes: weights and gradients, the optimizer's state and what its
    step works with, and what a forward of ``tokens`` saves for its backward."""
    weights, replicas = weight_bytes(shapes, trainer.dtype, parallel.tensor), parallel.data * parallel.context
    if trainer.offload_parameters == "nvme":
        held = _paged_bytes(shapes, trainer, parallel)
    elif trainer.offload == "nvme":
        held = cut_by_zero(weights, 0, replicas, parallel.zero) // parallel.pipeline + STAGING_BYTES
    else:
        moments = state_bytes(shapes, trainer) // parallel.tensor
        held = cut_by_zero(weights, moments, replicas, parallel.zero) // parallel.pipeline + working_bytes(shapes, trainer, parallel)
    # Emulated precision holds every rounded matrix until the backward has passed it.
    copies = weights // parallel.pipeline if trainer.precision != "fp32" else 0
    saved = waiting_passes(parallel) * saved_bytes(shapes, trainer, tokens, parallel)
    if trainer.offload_activations == "nvme":
        # A layer's own are there while it computes, and in the backward pass as many gradients of them.
        at_work = 2 * tokens * largest_layer_activation_bytes_per_token(shapes) // token_sharing(parallel)
        saved = min(saved, 2 * ACTIVATIONS_IN_FLIGHT_BYTES + at_work)
    return held + copies + saved + min(4 * tokens * shapes.vocab_size, KEPT_LOGITS_BYTES) // token_sharing(parallel)


def saved_bytes(shapes: ModelShapes, trainer: TrainerConfig, tokens: int, parallel: ParallelConfig = ONE_PROCESS) -> int:
    """What the layers of one process of the mesh save of one forward of ``tokens`` for its backward."""
    each = activation_bytes_per_token(shapes, trainer.recompute) + _rounded_bytes_per_token(shapes, trainer)
    return tokens * each // (token_sharing(parallel) * parallel.pipeline)


def waiting_passes(parallel: ParallelConfig, stage: int = 0) -> int:
    """Forward passes that wait for their backward at once on a rank of pipeline stage ``stage``, under 1F1B."""
    return parallel.pipeline - stage


def token_sharing(parallel: ParallelConfig) -> int:
    """Among how many ranks the tokens of a forward are divided."""
    return parallel.context * (parallel.tensor if parallel.sequence_parallel else 1)


def _paged_bytes(shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig) -> int:
    """Weights, gradients and moments where the layers' are in a file: what stands outside of layers, the weights of two layers, the gradients of
    one that are on their way, two more gradients, and the pager's buffers. Where ranks cut them: this rank's part of the weights and gradients
    outside of layers beside the whole ones, and of two layers the part that is read ahead and that of gradients on their way."""
    layers = [held_by_layer(shapes, layer) for layer in range(shapes.num_hidden_layers)]
    largest = max(sum(count for count, _ in held) for held in layers)
    parameter = max(count for held in layers for count, _ in held)
    outside, replicas = 2 * sum(held_outside_layers(shapes)), parallel.data * parallel.context
    numbers = outside + 3 * largest + 2 * parameter
    if parallel.world > 1:
        # A layer's gradients lie end to end once more while they are summed.
        numbers = outside + outside // replicas + 4 * largest + 4 * largest // replicas
    return numbers // parallel.tensor * DTYPE_BYTES[trainer.dtype] + 2 * STAGING_BYTES


def state_bytes(shapes: ModelShapes, trainer: TrainerConfig) -> int:
    """What the optimizer of one process holds in memory from one step to the next."""
    return STAGING_BYTES if trainer.offload == "nvme" else optimizer_bytes(shapes, trainer.optimizer)


def working_bytes(shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig = ONE_PROCESS) -> int:
    """What the optimizer at most needs besides in its step: one matrix at a time, which Muon has whole on every rank; where ZeRO cuts its
    momentum, the directions of a layer too."""
    if trainer.offload == "nvme":
        return 0
    largest = 4 * max(count for count, is_hidden in held_parameters(shapes) if is_hidden)
    if trainer.optimizer == "muon":
        layer = 4 * max(sum(count for count, _ in held_by_layer(shapes, index)) for index in range(shapes.num_hidden_layers))
        return 4 * largest + (layer // parallel.tensor if parallel.zero else 0)
    return 3 * largest // parallel.tensor if trainer.optimizer == "adamw8bit" else 0


def checkpoint_bytes(shapes: ModelShapes, trainer: TrainerConfig) -> int:
    """Bytes of one checkpoint: weights and the optimizer's state; the tokenizer beside them is not counted."""
    return weight_bytes(shapes, trainer.dtype) + optimizer_bytes(shapes, trainer.optimizer)


def offloaded_bytes(shapes: ModelShapes, trainer: TrainerConfig, tokens: int, parallel: ParallelConfig = ONE_PROCESS) -> int:
    """What all ranks of one machine have in ``trainer.offload_folder`` where a forward has ``tokens``: moments, of each rank those that it
    updates, and the staged copy of a checkpoint, which all ranks divide; weights and gradients of the layers, and the copy from which a model
    that is cut is exported; activations."""
    found, here, world = 0, parallel.ranks_of_a_node, parallel.world
    # Without ZeRO the ranks that hold the same weights update all of them.
    copies = 1 if parallel.zero else parallel.data * parallel.context
    if trainer.offload == "nvme":
        found += (copies * optimizer_bytes(shapes, trainer.optimizer) + checkpoint_bytes(shapes, trainer)) * here // world
    if trainer.offload_parameters == "nvme":
        layers = [held_by_layer(shapes, layer) for layer in range(shapes.num_hidden_layers)]
        found += 2 * DTYPE_BYTES[trainer.dtype] * sum(count for held in layers for count, _ in held) * here // world
        found += weight_bytes(shapes, trainer.dtype) if world > 1 else 0
    if trainer.offload_activations == "nvme":
        passes = sum(waiting_passes(parallel, stage) for stage in range(parallel.pipeline))
        found += passes * saved_bytes(shapes, trainer, tokens, parallel) * here // parallel.pipeline
    return found


def run_bytes_on_disk(
    shapes: ModelShapes, trainer: TrainerConfig, checkpoints_kept: int, is_created: bool, tokens: int = 0, parallel: ParallelConfig = ONE_PROCESS
) -> int:
    """What a run writes at its fullest moment: the checkpoints that stay, one more while it is committed, the exported model, the start
    model where the run makes it, and what is offloaded to the run's own folder where a forward has ``tokens``."""
    weights = weight_bytes(shapes, trainer.dtype)
    offloaded = 0 if trainer.offload_folder else offloaded_bytes(shapes, trainer, tokens, parallel)
    return (checkpoints_kept + 1) * checkpoint_bytes(shapes, trainer) + (2 if is_created else 1) * weights + offloaded


def _rounded_bytes_per_token(shapes: ModelShapes, trainer: TrainerConfig) -> int:
    """Emulated precision saves each linear layer's input rounded, beside what fp32 saves."""
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
