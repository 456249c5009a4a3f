"""The recipe of a small pretraining run on the datasets of ``package_data``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def recipe_sections(made: Path, /, *, create: Mapping[str, Any] | None = None, **changed: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recipe's sections: a model of two layers with the tokenizer in ``made``, with ``create`` and ``changed`` over the defaults."""
    model = {
        "architecture": "qwen3", "tokenizer": str(made / "tokenizer"), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64, "max_position_embeddings": 64, "initializer_range": 0.1,
        **(create or {}),
    }  # fmt: skip
    sections: dict[str, Any] = {
        "algorithm": {"name": "pretrain"},
        "model": {"create": model},
        "data": {"sequence_length": 48},
        "trainer": {"learning_rate": 3.0e-3},
        "run": {"seed": 3},
        "machine": {"threads": 1},
    }
    return {name: {**sections.get(name, {}), **changed.get(name, {})} for name in {**sections, **changed}}


def write_recipe(folder: Path, made: Path, /, **sections: Any) -> Path:
    """Writes ``recipe_sections(made, ...)`` of a run in ``folder``/run to ``folder``/recipe.yaml; returns its path."""
    recipe = recipe_sections(made, **sections)
    recipe["run"] |= {"directory": str(folder), "name": "run"}
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"
