"""The shapes of the models of a run of reinforcement learning."""

from dataclasses import replace

from tandem.config.recipe import Recipe
from tandem.estimate.rl_work import RLModels
from tandem.layout.shapes import ModelShapes
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.model_source import found_model
from tandem.model.value_config import start_shapes


def rl_models(recipe: Recipe, actor: ModelShapes) -> RLModels:
    """Returns the shapes of the models of ``recipe``, whose reinforcement learning starts from a model of the shapes ``actor``."""
    referred, scored = recipe.reference.path, recipe.reward_model.path
    critic = None
    if recipe.has_critic:
        # As ``start_shapes`` has it, of a folder that need not be there yet.
        with_head = replace(actor, value_head="token", language_head=False, tie_word_embeddings=False)
        critic = start_shapes(found_model(recipe.critic.path), "token") if recipe.critic.path else with_head
    reference = read_shapes(found_model(referred), implemented_by=recipe.model.implemented_by) if referred else None
    return RLModels(actor, reference, critic, read_shapes(found_model(scored), "any") if scored else None)
