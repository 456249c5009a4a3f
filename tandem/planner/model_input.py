"""The model of a plan: a Hugging Face folder, its ``config.json``, or a recipe. Imports no torch."""

from pathlib import Path
from typing import Any

from tandem.config.bundled import bundled_recipes
from tandem.config.model import ModelConfig
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import load_config
from tandem.layout.shapes import ModelShapes
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.model_source import find_model
from tandem.model.new_model import folder_without_weights
from tandem.planner.model_sizes import read_model_sizes
from tandem.planner.recipe_step import batch_sequences, sequence_tokens
from tandem.types.errors import UserError


def read_model(name: str, ignored: tuple[str, ...] = ()) -> tuple[ModelShapes, dict[str, Any]]:
    """Returns the sizes of a model, and what a recipe says of the step: ``sequence``, ``global_batch`` and ``trainer``. Raises ``UserError``."""
    path = Path(name)
    if is_recipe(name):
        recipe = load_config(name)
        if isinstance(recipe, PretrainRecipe) and recipe.trains_draft:
            raise UserError(
                f"'{name}' trains a draft head beside a model that stays as it is, whose layouts are not compared; 'tandem train {name} --dry-run' predicts "
                "the memory and time of one"
            )
        shapes = recipe_shapes(recipe.model, ignored)
        return shapes, {"sequence": sequence_tokens(recipe, shapes), "global_batch": batch_sequences(recipe), "trainer": recipe.trainer}
    if path.is_dir() or path.suffix == ".json":
        return read_model_sizes(path, ignored), {}
    raise UserError(f"'{name}' is no Hugging Face folder, no config.json and no recipe; name one, or give the sizes by flag (see 'tandem plan --help')")


def is_recipe(name: str) -> bool:
    """Returns whether ``name`` is that of a recipe, in a file or with Tandem."""
    return Path(name).suffix in (".yaml", ".yml") or (name in bundled_recipes() and not Path(name).exists())


def recipe_shapes(model: ModelConfig, ignored: tuple[str, ...] = ()) -> ModelShapes:
    """Returns the sizes of a recipe's model."""
    if model.create is not None:
        with folder_without_weights(model.create) as folder:
            return read_shapes(folder)
    assert model.path is not None
    folder = find_model(model.path, "description")
    if model.implemented_by.is_transformers:
        return read_shapes(folder, implemented_by=model.implemented_by)
    return read_model_sizes(folder, ignored, as_trained=True)
