"""Peak resident bytes of one training process: the process itself, training state, and communication buffers. Imports no torch."""

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.model_bytes import held_by_layer, held_outside_layers, trained_bytes
from tandem.estimate.training_bytes import ONE_PROCESS, checkpoint_bytes, training_bytes
from tandem.layout.shapes import ModelShapes
from tandem.types.dtypes import DTYPE_BYTES

TRAINING_PROCESS_BYTES = 270 * 2**20
"""Measured, torch 2.13 on a CPU: a rank that has loaded torch and the kernels and joined its process groups, without its weights; 160 MiB
are pages of libraries, which ranks of one machine share and which count as resident in each."""
COMPILER_BYTES = 140 * 2**20
"""Measured: torch's compiler, which ``torch.utils.checkpoint`` imports and nothing else does."""
DEEPSPEED_BYTES = 150 * 2**20
"""Measured, DeepSpeed 0.19.8: what a rank has loaded with it, torch's compiler included."""
DEEPSPEED_BUCKET = 2**24
"""Elements of the buffer in which DeepSpeed reduces gradients (``reduce_bucket_size``), at most."""
KEPT_SHARE = 0.1
"""Measured: the share of a rank's memory that is freed but kept by the allocator because of fragmentation."""
BUCKETS_UNDER_WAY = 2
"""Gradient reductions in flight (``trainer.parallel.gradient_reducer``); each has a send and a receive buffer."""
WHOLE_LAYERS = 2
"""Layers whose weights ZeRO 3 has gathered at once: the current one and the next."""


def peak_bytes(shapes: ModelShapes, trainer: TrainerConfig, tokens: int, parallel: ParallelConfig = ONE_PROCESS, attended: int = 0) -> int:
    """Returns the predicted peak resident bytes of one process of the mesh that runs micro-batches of ``tokens`` on a CPU, from its start
    to its last checkpoint. Batches that are read ahead are not included (``training_bytes.batch_bytes``). ``attended``: as in ``saved_bytes``."""
    working = training_bytes(shapes, trainer, tokens, parallel, attended) + exchange_bytes(shapes, trainer, parallel)
    return process_bytes(trainer) + int((1 + KEPT_SHARE) * working) + staging_bytes(shapes, trainer, parallel)


def process_bytes(trainer: TrainerConfig) -> int:
    """Returns the resident bytes of a rank without its weights and activations."""
    if trainer.backend == "deepspeed":
        return TRAINING_PROCESS_BYTES + DEEPSPEED_BYTES
    return TRAINING_PROCESS_BYTES + (COMPILER_BYTES if trainer.recompute == "full" else 0)


def staging_bytes(shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig = ONE_PROCESS) -> int:
    """Returns the bytes of the staged copy that a checkpoint is written from during training, which all ranks share. With offloaded moments
    it is in a file."""
    return 0 if trainer.offload == "nvme" else checkpoint_bytes(shapes, trainer) // parallel.world


def exchange_bytes(shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig) -> int:
    """Returns the bytes that a data-parallel rank holds in addition to its part: gradients of layers, and of parameters outside them, that
    are being reduced; under ZeRO 2 and 3 the gradients that a backward pass has not yet reduced; and under ZeRO 3 the gathered weights. With DeepSpeed its
    buffer for reductions, and the second copy of the weights that a rank updates."""
    if trainer.backend == "deepspeed":
        size = trained_bytes(shapes, trainer.dtype)
        gathered = sum(held_outside_layers(shapes)) * DTYPE_BYTES[trainer.dtype] if parallel.zero == 3 else 0
        return size // parallel.data + min(size, DEEPSPEED_BUCKET * DTYPE_BYTES[trainer.dtype]) + gathered
    if parallel.data * parallel.context == 1 or trainer.offload_parameters == "nvme":
        return 0
    outside = held_outside_layers(shapes)
    layer = max(sum(count for count, _ in held_by_layer(shapes, index)) for index in range(shapes.num_hidden_layers))
    if shapes.lora is not None:
        # Only the adapter's gradients are reduced.
        outside, layer = [0], trained_bytes(shapes, trainer.dtype) // DTYPE_BYTES[trainer.dtype] // shapes.num_hidden_layers
    numbers = 2 * BUCKETS_UNDER_WAY * layer + 2 * max(outside)
    if parallel.zero >= 2:
        # The gradient of a tied embedding begins with the head's and ends with the embedding's.
        numbers += layer + outside[0]
    if parallel.zero == 3:
        numbers += WHOLE_LAYERS * layer + sum(outside)
    return numbers // parallel.tensor * DTYPE_BYTES[trainer.dtype]
