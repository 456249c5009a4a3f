"""The prompts of a recipe for the model in a folder: one tokenizer, one chat template, one context length."""

from pathlib import Path

from tandem.config.recipe import Recipe
from tandem.data.prompts import PromptSource
from tandem.model.huggingface_config import read_shapes
from tandem.text.chat import apply_chat_template
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError


def context_tokens(recipe: Recipe, folder: Path) -> int:
    """Tokens that prompt and completion may have together. Raises ``UserError`` where the recipe asks for more than the
    model has."""
    most = read_shapes(folder).max_position_embeddings
    if recipe.model.max_length > most:
        raise UserError(f"'model.max_length' is {recipe.model.max_length}, more than the {most} positions of the model in {folder}")
    context = recipe.model.max_length or most
    if recipe.rollout.max_tokens >= context:
        raise UserError(
            f"'rollout.max_tokens' is {recipe.rollout.max_tokens}, which leaves no room for a prompt in a context of {context} tokens; "
            "lower it or raise model.max_length"
        )
    return context


def prompt_source(recipe: Recipe, folder: Path) -> PromptSource:
    """The recipe's prompts, tokenised for the model in ``folder``. A chat template writes its own special tokens."""
    tokenizer = Tokenizer.from_folder(folder)
    chat = recipe.task.chat
    return PromptSource(
        recipe.task,
        lambda text: tokenizer.encode(text, add_special_tokens=not chat),
        seed=recipe.run.seed,
        prompts_per_step=recipe.rollout.prompts_per_step,
        context_tokens=context_tokens(recipe, folder),
        max_new_tokens=recipe.rollout.max_tokens,
        render_chat=(lambda messages: apply_chat_template(folder, messages)) if chat else None,
    )
