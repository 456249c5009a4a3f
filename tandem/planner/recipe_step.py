"""The tokens and sequences of a recipe's step. Imports no torch."""

from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import AnyRecipe, Recipe
from tandem.layout.shapes import ModelShapes


def sequence_tokens(recipe: AnyRecipe, shapes: ModelShapes) -> int:
    """Returns the tokens of the longest sequence that is trained on: of reinforcement learning, what prompt and completion may have together."""
    if isinstance(recipe, PretrainRecipe):
        return recipe.data.sequence_length
    most = shapes.max_position_embeddings
    context = min(recipe.model.max_length or shapes.default_context, most)
    return min(context, recipe.rollout.engine.max_model_len or context)


def batch_sequences(recipe: AnyRecipe) -> int:
    """Returns the sequences of a step."""
    if isinstance(recipe, PretrainRecipe):
        return recipe.data.global_batch_size * recipe.sequences_each
    assert isinstance(recipe, Recipe)
    return recipe.rollout.prompts_per_step * recipe.algorithm.group_size
