"""The prompts of a recipe for the model in a folder: what a prompt and its completion may have together."""

from pathlib import Path

from tandem.config.model import ModelConfig
from tandem.config.recipe import Recipe
from tandem.data.prompts import PromptSource
from tandem.data.task_prompts import task_prompts
from tandem.model.huggingface.model_config import read_shapes
from tandem.types import UserError


def context_tokens(model: ModelConfig, max_new_tokens: int, folder: Path) -> int:
    """Returns the tokens that prompt and completion may have together. ``max_new_tokens``: ``rollout.max_tokens``. Raises ``UserError`` where
    the recipe asks for more than the model in ``folder`` has."""
    shapes = read_shapes(folder, implemented_by=model.implemented_by)
    most = shapes.max_position_embeddings
    if model.max_length > most:
        raise UserError(f"'model.max_length' is {model.max_length}, more than the {most} positions of the model in {folder}")
    context = model.max_length or shapes.default_context
    if max_new_tokens >= context:
        raise UserError(
            f"'rollout.max_tokens' is {max_new_tokens}, which leaves no room for a prompt in a context of {context} tokens; "
            "lower it or raise model.max_length"
        )
    return context


def prompt_source(recipe: Recipe, folder: Path) -> PromptSource:
    """The recipe's prompts, tokenised for the model in ``folder``."""
    return task_prompts(
        recipe.task, folder, seed=recipe.run.seed, prompts_per_draw=recipe.algorithm.prompts_per_round(recipe.rollout.prompts_per_step),
        rounds=recipe.algorithm.rounds, order=recipe.rollout.prompt_order,
        context_tokens=context_tokens(recipe.model, recipe.rollout.max_tokens, folder), max_new_tokens=recipe.rollout.max_tokens,
    )  # fmt: skip
