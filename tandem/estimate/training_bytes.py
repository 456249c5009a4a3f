"""Bytes of a trainer's batches, head, optimizer and checkpoints, by optimizer, precision and offload. Imports no torch."""

from tandem.config.parallel import ParallelConfig
from tandem.config.pretrain import DataConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.model_bytes import DTYPE_BYTES, held_by_layer, held_parameters, optimizer_bytes, trained_bytes
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


def gathered_bytes_per_token(shapes: ModelShapes) -> int:
    """Returns the bytes of the keys and values that one layer copies for each token that a sequence with a shared prompt attends to, in fp32."""
    return 4 * 2 * shapes.key_value_size


def token_sharing(parallel: ParallelConfig) -> int:
    """Returns the number of ranks that share the tokens of a forward pass."""
    return parallel.context * (parallel.tensor if parallel.sequence_parallel else 1)


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
