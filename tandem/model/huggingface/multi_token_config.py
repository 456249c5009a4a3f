"""Which layer of multi-token prediction a Hugging Face folder has behind the last layer of its model, as its ``config.json`` says it. Imports no torch."""

from dataclasses import replace
from pathlib import Path

from tandem.layout.shapes import ModelShapes
from tandem.model.huggingface.model_config import read_json
from tandem.model.quantization.formats import is_packed_config
from tandem.types import UserError

LAYERS_KEY = "num_nextn_predict_layers"


def check_predictor(folder: str | Path, shapes: ModelShapes) -> None:
    """Raises ``UserError`` if the model of ``shapes`` in ``folder`` has no layer of multi-token prediction that is read, by its ``config.json`` alone."""
    config = read_json(Path(folder) / "config.json")
    count = config.get(LAYERS_KEY)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UserError(
            f"speculative_config method is 'mtp' and model '{folder}' has {LAYERS_KEY} {str(count)[:40]}: no layer of multi-token prediction; choose method "
            "'ngram', 'suffix' or 'draft'"
        )
    if is_packed_config(config) or shapes.transformers is not None:
        what = "is quantized" if is_packed_config(config) else "is computed by transformers"
        raise UserError(f"speculative_config method is 'mtp' and model '{folder}' {what}, where no layer of multi-token prediction is read; use 'ngram'")


def layer_shapes(shapes: ModelShapes, shares_vocabulary: bool) -> ModelShapes:
    """Returns the shapes of the decoder that has the layer alone; ``shares_vocabulary``: without an embedding and a head of its own."""
    experts = None if shapes.experts is None else replace(shapes.experts, dense_layers=())
    windows = shapes.layer_windows and (shapes.window(shapes.num_hidden_layers - 1),)
    # A decoder has an embedding; one row of it is the smallest.
    return replace(
        shapes, num_hidden_layers=1, experts=experts, layer_windows=windows, unrotated_layers=(), lora=None, value_head="none", tie_word_embeddings=False,
        language_head=not shares_vocabulary, vocab_size=1 if shares_vocabulary else shapes.vocab_size,
    )  # fmt: skip
