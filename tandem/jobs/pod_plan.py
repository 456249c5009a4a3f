"""The memory plan of a recipe's pod."""

from tandem.config.recipe import Recipe
from tandem.layout.shapes import ModelShapes
from tandem.pod.residents import PodPlan, plan


def plan_of(recipe: Recipe, shapes: ModelShapes, context_tokens: int) -> PodPlan:
    """Returns the plan for a model of ``shapes``. Raises ``RunError`` where the pod does not fit."""
    return plan(
        recipe.rollout, recipe.algorithm, recipe.trainer, recipe.parallel, recipe.machine, shapes, context_tokens, recipe.rollout_precision
    )
