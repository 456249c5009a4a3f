"""A small model with random weights, in a folder that transformers can load too."""

from pathlib import Path

import pytest

from tandem.config.model import NewModelConfig


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tandem.model.create_model import create_model

    folder = tmp_path_factory.mktemp("models") / "small"
    config = NewModelConfig(
        characters="abcdefghijklmnopqrstuvwxyz .?\n", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    create_model(config, 0, folder)
    return folder
