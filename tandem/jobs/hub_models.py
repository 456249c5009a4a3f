"""The models that a recipe names on the Hugging Face Hub: downloaded before a run starts, and named by their commits in the recipe of the run, so that
a resumed run does not depend on a branch that moves."""

from dataclasses import replace

from tandem.config.model import ModelConfig
from tandem.config.recipe import AnyRecipe, Recipe
from tandem.model.huggingface.hub import Part, bytes_to_download, hub_model
from tandem.model.model_source import commit_of, find_model
from tandem.text.fast_tokenizer import original_folder


def with_commits(recipe: AnyRecipe, part: Part = "model") -> AnyRecipe:
    """Downloads ``part`` of every model of the Hub that ``recipe`` names, and returns the recipe with their commits. Raises ``UserError``."""
    model = recipe.model
    if model.path is not None:
        model = replace(model, path=_pinned(model.path, "model.path", part))
    elif model.create is not None and model.create.tokenizer:
        model = replace(model, create=replace(model.create, tokenizer=_pinned(model.create.tokenizer, "model.create.tokenizer", "tokenizer")))
    recipe = recipe if model == recipe.model else replace(recipe, model=model)
    if not isinstance(recipe, Recipe):
        return recipe
    if recipe.has_critic and recipe.critic.path:
        recipe = replace(recipe, critic=replace(recipe.critic, path=_pinned(recipe.critic.path, "critic.path", part)))
    if recipe.reference.path:
        recipe = replace(recipe, reference=replace(recipe.reference, path=_pinned(recipe.reference.path, "reference.path", part)))
    if recipe.reward_model.path:
        recipe = replace(recipe, reward_model=replace(recipe.reward_model, path=_pinned(recipe.reward_model.path, "reward_model.path", part)))
    draft = recipe.rollout.engine.speculative_config
    if draft is None or draft.model is None:
        return recipe
    pinned = replace(draft, model=_pinned(draft.model, "rollout.engine.speculative_config.model", part))
    return recipe if pinned == draft else replace(recipe, rollout=replace(recipe.rollout, engine=replace(recipe.rollout.engine, speculative_config=pinned)))


def describe_download(model: ModelConfig) -> list[str]:
    """Returns a line on the commit and the missing weights of a model of the Hub, whose description has been downloaded; none for another model.
    Raises ``UserError`` for one without weights in safetensors."""
    named = None if model.path is None else hub_model(model.path)
    if named is None:
        return []
    missing = bytes_to_download(named, original_folder(find_model(str(named), "description")), "--model.path=FOLDER")
    return [f"model: {named.repo} at commit {named.revision[:12]}, " + (f"{missing / 2**20:,.1f} MiB to download" if missing else "downloaded")]


def _pinned(name: str, key: str, part: Part) -> str:
    """Returns ``name``, with its commit for a model of the Hub, of which ``part`` is downloaded."""
    named = hub_model(name)
    if named is None:
        return name
    return str(commit_of(find_model(name, part, option=f"--{key}=FOLDER")) or named)
