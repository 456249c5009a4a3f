"""Shapes and tokenizer of a model that is created from a recipe. Imports no torch."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tandem.config.model import NewModelConfig
from tandem.config.unread import refuse_unread
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.shapes import ModelShapes
from tandem.model.family import all_families, family_to_create
from tandem.model.huggingface.config_reader import ConfigReader
from tandem.model.huggingface.model_config import config_json
from tandem.model.model_source import found_model
from tandem.runtime.process.temporary import temporary_folder
from tandem.text.characters import make_character_tokenizer
from tandem.text.tokenizer import TOKENIZER_FILES, Tokenizer
from tandem.types import RunError, UserError


def shapes_of(config: NewModelConfig, vocab_size: int) -> ModelShapes:
    """Returns the shapes that ``config`` describes, with the defaults of its family; a mixture of experts is in every layer, with
    normalised gates. Raises ``UserError`` for a family that is unknown or has no such model."""
    family = family_to_create(config.architecture)
    experts = None
    if family.experts is None:
        fix = f"choose an architecture with experts ({', '.join(name for name, each in all_families().items() if each.experts is not None)})"
        reason = f"{family.model_type} models have no experts"
        refuse_unread("model.create", config, reason, "num_experts", "num_experts_per_tok", "moe_intermediate_size", fix=fix)
    else:
        inner = config.moe_intermediate_size or config.intermediate_size
        experts = ExpertShapes(config.num_experts, config.num_experts_per_tok, inner, names=family.experts.names, **family.experts.new(inner))
    biases = family.biases(ConfigReader({}, "model.create"))
    latent = None if family.new_latent is None else family.new_latent(config.head_dim)
    try:
        shapes = ModelShapes(
            architecture=family.model_type,
            vocab_size=vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads if latent is None else config.num_attention_heads,
            head_dim=config.head_dim if latent is None else latent.head_dim,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=config.tie_word_embeddings,
            rope_theta=config.rope_theta,
            attention_bias=biases.attention,
            output_bias=biases.output,
            mlp_bias=biases.mlp,
            rotary_fraction=1.0 if family.rotary_fraction is None else family.rotary_fraction,
            **(family.constants | ({} if family.terms is None else family.terms.new(config.num_hidden_layers))),
            experts=experts,
            latent=latent,
        )
        config_json(shapes)
    except ValueError as error:
        raise UserError(f"section 'model.create': {error}") from None
    return shapes


def write_tokenizer(config: NewModelConfig, folder: Path) -> None:
    """Writes the tokenizer that ``config`` names or describes to ``folder``. Raises ``UserError`` if it names a folder without a tokenizer."""
    if not config.tokenizer:
        make_character_tokenizer(config.characters, folder, chat=config.chat)
        return
    source = found_model(config.tokenizer)
    Tokenizer.from_folder(source)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


@contextmanager
def folder_without_weights(config: NewModelConfig) -> Iterator[Path]:
    """Yields a temporary folder with everything of the model except its weights, so that a run's inputs can be checked before any work."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(temporary_folder())
            write_tokenizer(config, folder)
            shapes = shapes_of(config, Tokenizer.from_folder(folder).vocab_size)
            (folder / "config.json").write_text(json.dumps(config_json(shapes)), encoding="utf-8")
        except OSError as error:
            # Without any folder that can be written, Python's message lists those that it tried.
            where = f"'{tempfile.tempdir}': " if tempfile.tempdir else ""
            raise RunError(
                f"temporary files cannot be written: {where}{error.strerror or error}; make room, or set TMPDIR to a folder that can be written"
            ) from None
        yield folder
