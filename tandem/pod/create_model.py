"""Make a small model and its tokenizer from a recipe, as a Hugging Face folder."""

from pathlib import Path
from tempfile import TemporaryDirectory

from tandem.config.model import NewModelConfig
from tandem.kernels.reference import ReferenceKernels
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface import save_model
from tandem.model.initialise import initialise
from tandem.text.characters import make_character_tokenizer
from tandem.text.tokenizer import Tokenizer


def shapes_of(config: NewModelConfig, vocab_size: int) -> ModelShapes:
    """The shapes that ``config`` describes, with the habits of its architecture (Qwen3: q/k norms; Qwen2: qkv biases)."""
    return ModelShapes(
        architecture=config.architecture,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_positions=config.max_positions,
        tie_embeddings=config.tie_embeddings,
        rope_theta=config.rope_theta,
        attention_bias=config.architecture == "qwen2",
        qk_norm=config.architecture == "qwen3",
    )


def create_model(config: NewModelConfig, seed: int, folder: Path) -> None:
    """Write the model to ``folder``; nothing is done where the folder stands already: it is written whole or not at all."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=".tokenizer-") as tokenizer_folder:
        make_character_tokenizer(config.characters, Path(tokenizer_folder))
        tokenizer = Tokenizer.from_folder(Path(tokenizer_folder))
        model = Decoder(shapes_of(config, tokenizer.vocab_size), ReferenceKernels())
        initialise(model, seed, config.initial_deviation)
        save_model(model, folder, Path(tokenizer_folder))
