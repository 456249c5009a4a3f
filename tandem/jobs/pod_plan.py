"""The memory plan of a recipe's pod."""

from pathlib import Path

from tandem.config.recipe import Recipe
from tandem.layout.shapes import ModelShapes, adapted_shapes
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.model_source import found_model
from tandem.pod.residents.plan import PodPlan, plan


def plan_of(recipe: Recipe, shapes: ModelShapes, context_tokens: int) -> PodPlan:
    """Returns the plan for a model of ``shapes``. Raises ``RunError`` where the pod does not fit."""
    return plan(
        recipe.residents, recipe.rollout, recipe.algorithm, recipe.trainer, recipe.parallel, recipe.machine,
        adapted_shapes(shapes, recipe.trainer.lora), context_tokens,
        recipe.rollout_precision, Path(recipe.trainer.offload_folder or recipe.run.directory),
        read_shapes(found_model(recipe.reward_model.path), "any") if recipe.reward_model.path else None, recipe.has_critic, recipe.holds_reference,
        recipe.reference.follows, read_shapes(found_model(recipe.reference.path)) if recipe.reference.path else None,
    )  # fmt: skip
