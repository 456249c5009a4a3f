"""The memory plan of a recipe's pod."""

from pathlib import Path

from tandem.config.recipe import AnyRecipe, Recipe
from tandem.jobs.checks.smallest_change import smallest_change
from tandem.layout.shapes import ModelShapes, adapted_shapes
from tandem.pod.residents.plan import FIX, PodPlan, plan
from tandem.pod.rl_models import rl_models
from tandem.types import RunError
from tandem.weight_transfer.sharing import can_share


def plan_of(recipe: Recipe, shapes: ModelShapes, context_tokens: int) -> PodPlan:
    """Returns the plan for a model of ``shapes``. Raises ``RunError`` with the smallest change that would fit where the pod does not."""
    try:
        return _plan(recipe, shapes, context_tokens)
    except RunError as error:
        refused = error

    def fits(changed: AnyRecipe) -> bool:
        assert isinstance(changed, Recipe)
        _plan(changed, shapes, context_tokens)
        return True

    change = smallest_change(recipe, fits)
    raise RunError(f"{str(refused).removesuffix(FIX)}{change}") if change else refused


def _plan(recipe: Recipe, shapes: ModelShapes, context_tokens: int) -> PodPlan:
    models = rl_models(recipe, shapes)
    return plan(
        recipe.residents, recipe.rollout, recipe.algorithm, recipe.trainer, recipe.parallel, recipe.machine,
        adapted_shapes(shapes, recipe.trainer.lora), context_tokens,
        recipe.rollout_precision, Path(recipe.trainer.offload_folder or recipe.run.directory),
        models.reward_model, models.critic, recipe.holds_reference, recipe.reference.follows, models.teacher, recipe.pods.count, recipe.ranks_here,
        recipe.shares_weights and can_share(shapes, recipe.trainer.dtype, recipe.rollout.weights),
    )  # fmt: skip
