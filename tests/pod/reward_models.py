"""A reward model for runs of the tiny recipe."""

from pathlib import Path
from typing import Any

from pod_runs import RECIPE

from tandem.config.load import build, read_yaml
from tandem.config.model import NewModelConfig
from tandem.model.create_model import create_model
from tandem.model.huggingface.safetensors_file import write_file
from tandem.model.initialise import drawn_matrix
from tandem.model.value_folder import make_value_folder


def write_reward_model(folder: Path, **settings: Any) -> Path:
    """Makes a reward model of the shape and the tokenizer of the tiny recipe's model, with a head of large numbers."""
    config = build(NewModelConfig, {**read_yaml(RECIPE)["model"]["create"], "initializer_range": 0.3, **settings}, "model.create")
    create_model(config, 5, folder / "language")
    made = make_value_folder(folder / "language", "sequence", 5, folder / "models" / "reward")
    write_file(made / "score.safetensors", [("score.weight", drawn_matrix(1, "score", (1, config.hidden_size), 0.5))])
    return made
