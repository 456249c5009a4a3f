"""Bytes of a training process and of what it writes, by optimizer, precision and offload. Imports no torch."""

from tandem.config.parallel import ParallelConfig
from tandem.config.pretrain import DataConfig
from tandem.config.trainer import TrainerConfig
from tandem.layout.bytes import (
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
"""Of offloaded activations so many are at most on their way to the file, and as many on their way back (``trainer.saved_pages``)."""

SEQUENCE_BYTES, TOKEN_BYTES = 550, 100
"""Measured: a sequence that waits in a batch (views of its shard), and each token of the batch at work (``TrainSequence`` and ``MicroBatch``)."""


def batch_bytes(data: DataConfig, parallel: ParallelConfig = ONE_PROCESS) -> int:
    """Resident bytes of one rank's batches: those that are read ahead, the one that is being read and the one at work."""
    sequences = -(-data.sequences_per_step // parallel.data)
    return sequences * ((data.read_ahead + 2) * SEQUENCE_BYTES + data.sequence_length * TOKEN_BYTES)


def training_bytes(shapes: ModelShapes, trainer: TrainerConfig, tokens: int, parallel: ParallelConfig = ONE_PROCESS) -> int:
    """Resident bytes of one process of the mesh besides what any process takes: weights and gradients, the optimizer's state and what its
    step works with, and what a forward of ``tokens`` saves for its backward."""
    weights = weight_bytes(shapes, trainer.dtype, parallel.tensor)
    moments = resident_state_bytes(shapes, trainer) // parallel.tensor
    if trainer.offload_parameters == "nvme":
        held = _paged_bytes(shapes, trainer)
    else:
        held = cut_by_zero(weights, moments, parallel.data * parallel.context, parallel.zero)
    # Emulated precision holds every rounded matrix until the backward has passed it.
    copies = weights if trainer.precision != "fp32" else 0
    saved = saved_bytes(shapes, trainer, tokens)
    if trainer.offload_activations == "nvme":
        # A layer's own are there while it computes, and in the backward pass as many gradients of them.
        saved = min(saved, 2 * ACTIVATIONS_IN_FLIGHT_BYTES + 2 * tokens * largest_layer_activation_bytes_per_token(shapes))
    saved += min(4 * tokens * shapes.vocab_size, KEPT_LOGITS_BYTES)
    sharing = parallel.context * (parallel.tensor if parallel.sequence_parallel else 1)
    return (held + copies) // parallel.pipeline + saved // sharing


def saved_bytes(shapes: ModelShapes, trainer: TrainerConfig, tokens: int) -> int:
    """What the layers of a forward of ``tokens`` save for its backward."""
    return tokens * (activation_bytes_per_token(shapes, trainer.recompute) + _rounded_bytes_per_token(shapes, trainer))


def _paged_bytes(shapes: ModelShapes, trainer: TrainerConfig) -> int:
    """Weights, gradients and moments where the layers' are in a file: what stands outside of layers, the weights of two layers, the gradients of
    one that are on their way, two more gradients, and the pager's buffers."""
    layers = [held_by_layer(shapes, layer) for layer in range(shapes.num_layers)]
    largest = max(sum(count for count, _ in held) for held in layers)
    parameter = max(count for held in layers for count, _ in held)
    numbers = 2 * sum(held_outside_layers(shapes)) + 3 * largest + 2 * parameter
    return numbers * DTYPE_BYTES[trainer.dtype] + 2 * STAGING_BYTES


def resident_state_bytes(shapes: ModelShapes, trainer: TrainerConfig) -> int:
    """What the optimizer holds in memory, and at most needs besides in its step: one matrix at a time."""
    if trainer.offload == "nvme":
        return STAGING_BYTES
    largest = 4 * max(count for count, is_hidden in held_parameters(shapes) if is_hidden)
    working = {"adamw": 0, "muon": 4 * largest, "adamw8bit": 3 * largest}[trainer.optimizer]
    return optimizer_bytes(shapes, trainer.optimizer) + working


def checkpoint_bytes(shapes: ModelShapes, trainer: TrainerConfig) -> int:
    """Bytes of one checkpoint: weights and the optimizer's state; the tokenizer beside them is not counted."""
    return weight_bytes(shapes, trainer.dtype) + optimizer_bytes(shapes, trainer.optimizer)


def offloaded_bytes(shapes: ModelShapes, trainer: TrainerConfig, tokens: int) -> int:
    """What lies in ``trainer.offload_folder`` where a forward has ``tokens``: moments and the staged copy of a checkpoint; weights and
    gradients of the layers; activations."""
    found = 0
    if trainer.offload == "nvme":
        found += optimizer_bytes(shapes, trainer.optimizer) + checkpoint_bytes(shapes, trainer)
    if trainer.offload_parameters == "nvme":
        layers = [held_by_layer(shapes, layer) for layer in range(shapes.num_layers)]
        found += 2 * DTYPE_BYTES[trainer.dtype] * sum(count for held in layers for count, _ in held)
    if trainer.offload_activations == "nvme":
        found += saved_bytes(shapes, trainer, tokens)
    return found


def run_bytes_on_disk(shapes: ModelShapes, trainer: TrainerConfig, checkpoints_kept: int, is_created: bool, tokens: int = 0) -> int:
    """What a run writes at its fullest moment: the checkpoints that stay, one more while it is committed, the exported model, the start
    model where the run makes it, and what is offloaded to the run's own folder where a forward has ``tokens``."""
    weights = weight_bytes(shapes, trainer.dtype)
    offloaded = 0 if trainer.offload_folder else offloaded_bytes(shapes, trainer, tokens)
    return (checkpoints_kept + 1) * checkpoint_bytes(shapes, trainer) + (2 if is_created else 1) * weights + offloaded


def _rounded_bytes_per_token(shapes: ModelShapes, trainer: TrainerConfig) -> int:
    """Emulated precision saves each linear layer's input rounded, beside what fp32 saves."""
    if trainer.precision == "fp32":
        return 0
    hidden, total = shapes.hidden_size, shapes.hidden_size
    for layer in range(shapes.num_layers):
        experts = shapes.experts_of(layer)
        if experts is None:
            inner = hidden + shapes.intermediate_size
        else:
            inner = experts.experts_per_token * (hidden + experts.intermediate_size)
        total += hidden + shapes.query_size + inner
    return 4 * total
