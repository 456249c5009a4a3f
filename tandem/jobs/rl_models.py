"""The shapes of the models of a run of reinforcement learning."""

from pathlib import Path

from tandem.config.recipe import Recipe
from tandem.estimate.rl_work import RLModels
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.model_source import found_model
from tandem.model.value_config import start_shapes


def rl_models(recipe: Recipe, start: Path) -> RLModels:
    """Returns the shapes of the models of ``recipe``, whose reinforcement learning starts from the folder ``start``."""
    referred, scored = recipe.reference.path, recipe.reward_model.path
    return RLModels(
        read_shapes(start),
        read_shapes(found_model(referred)) if referred else None,
        start_shapes(found_model(recipe.critic.path) if recipe.critic.path else start, "token") if recipe.has_critic else None,
        read_shapes(found_model(scored), "any") if scored else None,
    )
