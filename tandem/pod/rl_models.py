"""The shapes of the models of a run of reinforcement learning."""

from dataclasses import replace
from pathlib import Path

from tandem.config.recipe import Recipe
from tandem.engine.spec_decode.draft_size import DraftSize, draft_size
from tandem.estimate.rl_work import RLModels
from tandem.estimate.training.layout import DraftTraining
from tandem.layout.eagle3 import Eagle3Shapes
from tandem.layout.shapes import ModelShapes, adapted_shapes
from tandem.model.huggingface.eagle3_config import read_eagle3_of
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.model_source import found_model
from tandem.model.value_config import start_shapes
from tandem.weight_transfer.manifest import segment_bytes


def draft_folder(recipe: Recipe) -> Path:
    """Returns the folder of the draft head of ``recipe``'s engine."""
    speculative = recipe.rollout.engine.speculative_config
    assert speculative is not None and speculative.model is not None
    return found_model(speculative.model).resolve()


def trained_head(recipe: Recipe, actor: ModelShapes) -> Eagle3Shapes | None:
    """Returns the shapes of the draft head that is trained beside an actor of the shapes ``actor``; ``None`` without section ``draft``."""
    return None if recipe.draft is None else read_eagle3_of(draft_folder(recipe), actor, own_embedding=True)


def published_bytes(recipe: Recipe, actor: ModelShapes) -> int:
    """Returns the bytes of a weight buffer for what the trainer publishes: an actor of the shapes ``actor``, or its adapter, and a draft head that is
    trained."""
    return segment_bytes(adapted_shapes(actor, recipe.trainer.lora), recipe.trainer.dtype, trained_head(recipe, actor))


def rl_models(recipe: Recipe, actor: ModelShapes) -> RLModels:
    """Returns the shapes of the models of ``recipe``, whose reinforcement learning starts from a model of the shapes ``actor``."""
    referred, scored = recipe.reference.path, recipe.reward_model.path
    critic = None
    if recipe.has_critic:
        # As ``start_shapes`` has it, of a folder that need not be there yet.
        with_head = replace(actor, value_head="token", language_head=False, tie_word_embeddings=False)
        critic = start_shapes(found_model(recipe.critic.path), "token") if recipe.critic.path else with_head
    reference = read_shapes(found_model(referred), implemented_by=recipe.model.implemented_by) if referred else None
    head = trained_head(recipe, actor)
    draft = None if head is None or recipe.draft is None else DraftTraining(head, recipe.draft.draft_steps)
    return RLModels(actor, reference, critic, read_shapes(found_model(scored), "any") if scored else None, draft)


def engine_draft(recipe: Recipe, actor: ModelShapes) -> DraftSize:
    """Returns what the draft of one of Tandem's engines takes beside an actor of the shapes ``actor``. Raises ``UserError`` as ``draft_size``."""
    engine = recipe.rollout.engine
    if recipe.rollout.backend != "tandem":
        return DraftSize()
    folder = found_model(recipe.model.path) if recipe.model.path else Path()
    return draft_size(engine.speculative_config, folder, actor, recipe.trainer.dtype, engine.tensor_parallel_size > 1)
