"""The memory plan of a recipe's pod."""

from functools import partial
from pathlib import Path

from tandem.config.recipe import AnyRecipe, Recipe
from tandem.estimate.kept_checkpoints import keeper_bytes
from tandem.estimate.model_bytes import weight_bytes
from tandem.estimate.training_bytes import checkpoint_bytes
from tandem.jobs.checks.smallest_change import smallest_change
from tandem.layout.shapes import ModelShapes, adapted_shapes
from tandem.model.huggingface.model_config import read_json
from tandem.model.quantization.formats import has_mxfp4
from tandem.pod.residents.plan import FIX, PodPlan, plan
from tandem.pod.rl_models import engine_draft, rl_models
from tandem.types import RunError
from tandem.weight_transfer.sharing import can_share


def plan_of(recipe: Recipe, shapes: ModelShapes, context_tokens: int, folder: Path | None = None) -> PodPlan:
    """Returns the plan for a model of ``shapes``, in ``folder`` if it is there already. Raises ``RunError`` with the smallest change
    that would fit where the pod does not."""
    planned = partial(_plan, shapes=shapes, context_tokens=context_tokens, is_mxfp4=folder is not None and has_mxfp4(read_json(folder / "config.json")))
    try:
        return planned(recipe)
    except RunError as error:
        refused = error

    def fits(changed: AnyRecipe) -> bool:
        assert isinstance(changed, Recipe)
        planned(changed)
        return True

    change = smallest_change(recipe, fits)
    raise RunError(f"{str(refused).removesuffix(FIX)}{change}") if change else refused


def keeps_experts_in_mxfp4(recipe: Recipe) -> bool:
    """Returns whether engines of ``recipe`` keep experts in the 4 bits of a folder in MXFP4: beside an adapter, because all other weights are replaced by
    those that a trainer has changed."""
    trainer, rollout = recipe.trainer, recipe.rollout
    # After a stage of fine-tuning the folder is another one.
    is_whole = recipe.sft is None and trainer.dtype == "float32" and recipe.rollout_precision == "fp32" and rollout.engine.tensor_parallel_size == 1
    return trainer.lora is not None and is_whole and rollout.backend == "tandem" and recipe.machine.kernels != "reference"


def _plan(recipe: Recipe, shapes: ModelShapes, context_tokens: int, is_mxfp4: bool) -> PodPlan:
    models = rl_models(recipe, shapes)
    return plan(
        recipe.residents, recipe.rollout, recipe.algorithm, recipe.trainer, recipe.parallel, recipe.machine,
        adapted_shapes(shapes, recipe.trainer.lora), context_tokens,
        recipe.rollout_precision, Path(recipe.trainer.offload_folder or recipe.run.directory),
        models.reward_model, models.critic, recipe.holds_reference, recipe.reference.follows, models.teacher, recipe.pods.count, recipe.ranks_here,
        recipe.shares_weights and can_share(shapes, recipe.trainer.dtype, recipe.rollout.weights), kept_here(recipe, shapes),
        is_mxfp4 and keeps_experts_in_mxfp4(recipe), models.draft, engine_draft(recipe, shapes),
    )  # fmt: skip


def kept_here(recipe: Recipe, shapes: ModelShapes) -> int:
    """Returns the most bytes of the keeper on the machine of the run, 0 without checkpoints in memory: those of the ranks there, and of those of a pod that
    joined, if such pods train."""
    if not recipe.checkpoint.memory_every_steps:
        return 0
    ranks = recipe.ranks_here + _joined_ranks(recipe)
    return keeper_bytes(_checkpoint_bytes(recipe, shapes) * ranks / recipe.parallel.world, ranks)


def kept_by_joined(recipe: Recipe, shapes: ModelShapes) -> int:
    """Returns the most bytes of the keeper of a pod that joins, 0 without one: those of its own ranks, and of those of the machine of the run or of another
    pod."""
    if not recipe.checkpoint.memory_every_steps or not recipe.pods.may_join:
        return 0
    own = _joined_ranks(recipe)
    ranks = own + max(own, recipe.ranks_here)
    return keeper_bytes(_checkpoint_bytes(recipe, shapes) * ranks / recipe.parallel.world, ranks)


def _joined_ranks(recipe: Recipe) -> int:
    """Returns the ranks that one pod which joined has."""
    return recipe.parallel.world // recipe.pods.trainer_count if recipe.pods.trainer_count > recipe.pods.count else 0


def _checkpoint_bytes(recipe: Recipe, shapes: ModelShapes) -> int:
    """Returns the bytes of a checkpoint of the actor, of a critic of its own, of a draft head that is trained, and of a reference that follows."""
    models, trained = rl_models(recipe, shapes), adapted_shapes(shapes, recipe.trainer.lora)
    followed = weight_bytes(shapes, recipe.trainer.dtype) if recipe.reference.follows else 0
    beside = sum(checkpoint_bytes(each, recipe.trainer) for each in models.saved_beside)
    return checkpoint_bytes(trained, recipe.trainer) + beside + followed
