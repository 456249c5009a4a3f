"""Predicts the bytes of each resident of one trainer rank. Imports no torch."""

from dataclasses import replace

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.gpu_bytes import frozen_bytes
from tandem.estimate.model_bytes import cut_by_zero, largest_layer_activation_bytes_per_token, weight_bytes
from tandem.estimate.training_bytes import head_bytes, state_bytes, token_sharing
from tandem.layout.shapes import ModelShapes

LIVE_LAYERS = 2
"""Layers whose activations a forward pass without a backward pass has at once: the current one and its input."""


def resident_bytes(
    shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, *, reference: bool, critic: bool = False, reward_model: ModelShapes | None = None,
    moments: int | None = None, follows: bool = False, teacher: ModelShapes | None = None,
) -> dict[str, int]:
    """Returns the bytes of each resident of ``layout.residents`` that is kept between two updates on one rank, by name. ``reference``: there is a
    reference model, which ``follows`` the actor or is frozen, of the shapes ``teacher`` if they are not the actor's; ``critic``: and one like the actor;
    ``reward_model``: and one of these shapes. ``moments``: bytes of a whole model's optimizer state, if they are not those of host memory."""
    replicas = parallel.data * parallel.context
    weights = 0 if trainer.offload_parameters == "nvme" else weight_bytes(shapes, trainer.dtype, parallel.tensor)
    whole = (state_bytes(shapes, trainer) if moments is None else moments) // parallel.tensor
    held = {
        "actor": cut_by_zero(weights, 0, replicas, parallel.zero, gradients=0) // parallel.pipeline,
        "optimizer": cut_by_zero(0, whole, replicas, parallel.zero, gradients=0) // parallel.pipeline,
    }
    if critic:
        # A critic has no adapter: all of it is trained.
        own = held if shapes.lora is None else resident_bytes(replace(shapes, lora=None), trainer, parallel, reference=False, moments=moments)
        held |= {f"critic{part}": own[name] for name, part in (("actor", ""), ("optimizer", "_optimizer"))}
    if reward_model is not None:
        held["reward_model"] = frozen_bytes(reward_model, trainer, parallel)
    return held | ({"updated_reference" if follows else "reference": frozen_bytes(teacher or shapes, trainer, parallel)} if reference else {})


def forward_bytes(shapes: ModelShapes, tokens: int, parallel: ParallelConfig) -> int:
    """Returns the bytes of a forward pass of ``tokens`` on one rank that saves nothing for a backward pass."""
    layer = LIVE_LAYERS * tokens * largest_layer_activation_bytes_per_token(shapes) // token_sharing(parallel)
    return layer + head_bytes(shapes, tokens, parallel)


def inference_bytes(shapes: ModelShapes, teacher: ModelShapes | None, tokens: int, parallel: ParallelConfig) -> int:
    """Returns ``forward_bytes`` of the larger of two models."""
    return max(forward_bytes(each, tokens, parallel) for each in (shapes, teacher or shapes))
