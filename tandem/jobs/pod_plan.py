"""The memory plan of a recipe's pod."""

from pathlib import Path

from tandem.config.recipe import Recipe
from tandem.jobs.rl_models import rl_models
from tandem.layout.shapes import ModelShapes, adapted_shapes
from tandem.pod.residents.plan import PodPlan, plan
from tandem.weight_transfer.sharing import can_share


def plan_of(recipe: Recipe, shapes: ModelShapes, context_tokens: int) -> PodPlan:
    """Returns the plan for a model of ``shapes``. Raises ``RunError`` where the pod does not fit."""
    models = rl_models(recipe, shapes)
    return plan(
        recipe.residents, recipe.rollout, recipe.algorithm, recipe.trainer, recipe.parallel, recipe.machine,
        adapted_shapes(shapes, recipe.trainer.lora), context_tokens,
        recipe.rollout_precision, Path(recipe.trainer.offload_folder or recipe.run.directory),
        models.reward_model, models.critic, recipe.holds_reference, recipe.reference.follows, models.teacher, recipe.pods.count, recipe.ranks_here,
        recipe.shares_weights and can_share(shapes, recipe.trainer.dtype, recipe.rollout.weights),
    )  # fmt: skip
