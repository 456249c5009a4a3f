"""Bytes of a run's files: what is offloaded, checkpoints and models. Imports no torch."""

from collections.abc import Iterable
from dataclasses import replace

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.model_bytes import DTYPE_BYTES, held_by_layer, optimizer_bytes, weight_bytes
from tandem.estimate.training.layout import layout_of_trainer
from tandem.estimate.training.rank_memory import saved_by_stage
from tandem.estimate.training_bytes import ONE_PROCESS, checkpoint_bytes
from tandem.layout.shapes import ModelShapes


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
        stages = saved_by_stage(shapes, layout_of_trainer(trainer, parallel, tokens))
        total += sum(stages) * here // parallel.pipeline
    return total


def run_bytes_on_disk(shapes: ModelShapes, trainer: TrainerConfig, checkpoints_kept: int, models: int) -> int:
    """Returns the largest size of a run's files without what is offloaded: the checkpoints that are kept, one more while it is committed, and
    ``models``, initial and exported ones."""
    return (checkpoints_kept + 1) * checkpoint_bytes(shapes, trainer) + models * weight_bytes(replace(shapes, lora=None), trainer.dtype)


def rl_bytes_on_disk(
    shapes: ModelShapes, trainer: TrainerConfig, checkpoints_kept: int, *, beside: Iterable[ModelShapes] = (), follows: bool = False,
) -> int:
    """Returns ``run_bytes_on_disk`` of a run of reinforcement learning: its models are the initial, the fine-tuned and the exported one, and of a reference
    that ``follows`` the actor the one in each checkpoint; models that are trained ``beside`` it are saved and exported too."""
    models = 3 + (checkpoints_kept + 1 if follows else 0)
    own = run_bytes_on_disk(shapes, trainer, checkpoints_kept, models)
    return own + sum(run_bytes_on_disk(each, trainer, checkpoints_kept, 1) for each in beside)
