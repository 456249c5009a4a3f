"""Creates a small model and its tokenizer from a recipe, as a Hugging Face folder."""

from pathlib import Path

from tandem.config.model import NewModelConfig
from tandem.kernels.reference import ReferenceKernels
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import save_model
from tandem.model.initialise import initialise
from tandem.model.new_model import shapes_of, write_tokenizer
from tandem.runtime.process.temporary import temporary_folder
from tandem.text.tokenizer import Tokenizer


def create_model(config: NewModelConfig, seed: int, folder: Path) -> None:
    """Writes the model with random weights to ``folder`` atomically. Does nothing if the folder exists."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder.parent, ".tokenizer") as tokenizer_folder:
        write_tokenizer(config, tokenizer_folder)
        tokenizer = Tokenizer.from_folder(tokenizer_folder)
        model = Decoder(shapes_of(config, tokenizer.vocab_size), ReferenceKernels())
        initialise(model, seed, config.initializer_range)
        save_model(model, folder, tokenizer_folder)
