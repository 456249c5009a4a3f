"""What a run whose model a module of transformers computes (``model.implementation: transformers``) cannot have."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tandem.config.model import ModelConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.types.errors import UserError

if TYPE_CHECKING:
    from tandem.config.recipe import Recipe

Refusal = tuple[str, object, tuple[object, ...], str]
"""A key, its value, the values that can be, and why the others cannot."""


def check_transformers_module(model: ModelConfig, trainer: TrainerConfig, parallel: ParallelConfig, more: Iterable[Refusal] = ()) -> None:
    """Raises ``UserError`` for the first key with a value that ``model.implementation: transformers`` cannot have. ``more``: those of other sections."""
    if not model.implemented_by.is_transformers:
        return
    whole = "computes whole models"
    refusals: tuple[Refusal, ...] = (
        ("trainer.backend", trainer.backend, ("tandem",), "is trained by Tandem's own trainer alone"),
        ("parallel.tensor", parallel.tensor, (1,), whole),
        ("parallel.pipeline", parallel.pipeline, (1,), whole),
        ("parallel.context", parallel.context, (1,), whole),
        ("parallel.expert", parallel.expert, (1,), whole),
        ("parallel.zero", parallel.zero, (0, 1, 2), "keeps whole weights on every rank"),
        ("trainer.router_bias_rate", trainer.router_bias_rate, (0.0,), "leaves routers as they are trained"),
        ("trainer.offload_parameters", trainer.offload_parameters, ("none",), "keeps weights in memory"),
        ("trainer.offload_activations", trainer.offload_activations, ("none",), "keeps activations in memory"),
        *more,
    )
    for key, value, possible, reason in refusals:
        if value not in possible:
            shown = f"'{value}'" if isinstance(value, str) else value
            fix = "leave it out" if possible == (None,) else f"set it to {' or '.join(str(each) for each in possible)}"
            raise UserError(f"'{key}' is {shown} and model.implementation 'transformers', which {reason}; {fix}")


def of_rollouts(recipe: "Recipe") -> Iterable[Refusal]:
    """Returns the refusals of the sections that only reinforcement learning has."""
    engine, one_model = recipe.rollout.engine, "computes the actor and its reference, not models with value heads"
    return (
        ("rollout.backend", recipe.rollout.backend, ("tandem",), "draws samples with Tandem's own engine alone"),
        ("rollout.engine.tensor_parallel_size", engine.tensor_parallel_size, (1,), "computes whole models"),
        ("algorithm.name", recipe.algorithm.name if recipe.has_critic else None, (None,), one_model),
        ("reward_model.path", recipe.reward_model.path or None, (None,), one_model),
    )
