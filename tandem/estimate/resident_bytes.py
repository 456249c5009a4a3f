"""Predicts the bytes of each resident of one trainer rank. Imports no torch."""

from collections.abc import Iterable

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.model_bytes import cut_by_zero, weight_bytes
from tandem.estimate.training.own_trainer import largest_layer_bytes_per_token
from tandem.estimate.training_bytes import gathered_bytes_per_token, head_bytes, state_bytes, token_sharing
from tandem.layout.shapes import ModelShapes

LIVE_LAYERS = 2
"""Layers whose activations a forward pass without a backward pass has at once: the current one and its input."""


def resident_bytes(
    shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, *, reference: bool, critic: ModelShapes | None = None,
    reward_model: ModelShapes | None = None, moments: bool = True, follows: bool = False, teacher: ModelShapes | None = None,
) -> dict[str, int]:
    """Returns the bytes of each resident of ``layout.residents`` that is kept between two updates on one rank, by name. ``reference``: there is a
    reference model, which ``follows`` the actor or is frozen, of the shapes ``teacher`` if they are not the actor's; ``critic``: and one of these shapes
    that is trained as the actor is; ``reward_model``: and a frozen one of these. ``moments``: whether optimizers hold their state in the memory in
    question."""
    replicas = parallel.data * parallel.context
    weights = 0 if trainer.offload_parameters == "nvme" else weight_bytes(shapes, trainer.dtype, parallel.tensor)
    whole = state_bytes(shapes, trainer) // parallel.tensor if moments else 0
    held = {
        "actor": cut_by_zero(weights, 0, replicas, parallel.zero, gradients=0) // parallel.pipeline,
        "optimizer": cut_by_zero(0, whole, replicas, parallel.zero, gradients=0) // parallel.pipeline,
    }
    if critic is not None:
        own = resident_bytes(critic, trainer, parallel, reference=False, moments=moments)
        held |= {f"critic{part}": own[name] for name, part in (("actor", ""), ("optimizer", "_optimizer"))}
    if reward_model is not None:
        held["reward_model"] = frozen_bytes(reward_model, trainer, parallel)
    return held | ({"updated_reference" if follows else "reference": frozen_bytes(teacher or shapes, trainer, parallel)} if reference else {})


def frozen_bytes(shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig) -> int:
    """Returns the bytes of one rank's part of a frozen copy of the weights, such as the reference model."""
    replicas = parallel.data * parallel.context if parallel.zero == 3 else 1
    return weight_bytes(shapes, trainer.dtype) // (parallel.tensor * parallel.pipeline * replicas)


def gradient_bytes(shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig) -> int:
    """Returns the bytes of one rank's gradients between a backward pass and the next rollout."""
    if trainer.offload_parameters == "nvme":
        return 0
    whole = weight_bytes(shapes, trainer.dtype, parallel.tensor)
    return cut_by_zero(0, 0, parallel.data * parallel.context, parallel.zero, gradients=whole) // parallel.pipeline


def forward_bytes(shapes: ModelShapes, tokens: int, parallel: ParallelConfig, attended: int = 0) -> int:
    """Returns the bytes of a forward pass of ``tokens`` on one rank that saves nothing for a backward pass. ``attended``: as in ``TrainingLayout``."""
    layer = LIVE_LAYERS * tokens * largest_layer_bytes_per_token(shapes) // token_sharing(parallel)
    return layer + attended * gathered_bytes_per_token(shapes) // parallel.tensor + head_bytes(shapes, tokens, parallel)


def inference_bytes(models: Iterable[ModelShapes | None], tokens: int, parallel: ParallelConfig, attended: int = 0) -> int:
    """Returns ``forward_bytes`` of that of ``models`` that needs most; 0 where there is none."""
    return max((forward_bytes(each, tokens, parallel, attended) for each in models if each is not None), default=0)
