"""What a model made from the recipe will be, said before it is made: its shapes and its tokenizer. Imports no torch."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tandem.config.model import NewModelConfig
from tandem.layout.shapes import EXPERT_NAMES, ExpertShapes, ModelShapes
from tandem.model.huggingface_config import config_json
from tandem.text.characters import make_character_tokenizer
from tandem.text.tokenizer import TOKENIZER_FILES, Tokenizer


def shapes_of(config: NewModelConfig, vocab_size: int) -> ModelShapes:
    """The shapes that ``config`` describes, with the habits of its architecture (Qwen3: q/k norms; Qwen2: qkv biases;
    mixtures of experts: in every layer, with normalised gates)."""
    inner = config.moe_intermediate_size or config.intermediate_size
    experts = ExpertShapes(config.num_experts, config.num_experts_per_tok, inner) if config.architecture in EXPERT_NAMES else None
    return ModelShapes(
        architecture=config.architecture,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        rope_theta=config.rope_theta,
        attention_bias=config.architecture == "qwen2",
        qk_norm=config.architecture in ("qwen3", "qwen3_moe"),
        experts=experts,
    )


def write_tokenizer(config: NewModelConfig, folder: Path) -> None:
    """The tokenizer that ``config`` names or describes, to ``folder``. Raises ``UserError`` where there is none."""
    if not config.tokenizer:
        make_character_tokenizer(config.characters, folder)
        return
    source = Path(config.tokenizer)
    Tokenizer.from_folder(source)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


@contextmanager
def folder_without_weights(config: NewModelConfig) -> Iterator[Path]:
    """A passing folder with everything of the model but its weights, so that what a run needs can be checked before any
    work."""
    with TemporaryDirectory(prefix="tandem-") as name:
        folder = Path(name)
        write_tokenizer(config, folder)
        shapes = shapes_of(config, Tokenizer.from_folder(folder).vocab_size)
        (folder / "config.json").write_text(json.dumps(config_json(shapes)), encoding="utf-8")
        yield folder
