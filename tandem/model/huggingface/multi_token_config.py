"""Which layer of multi-token prediction a Hugging Face folder has beside its model, by ``config.json`` and the names of its tensors. Imports no torch."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tandem.layout.shapes import ModelShapes
from tandem.model.huggingface.hub import INDEX, WEIGHTS
from tandem.model.huggingface.model_config import read_json
from tandem.model.huggingface.weight_files import tensor_names
from tandem.model.quantization.formats import is_packed_config
from tandem.types import UserError

LAYERS_KEY = "num_nextn_predict_layers"


class PredictorNames(NamedTuple):
    """The names in a folder of the tensors of the first layer of multi-token prediction: what those of the layer itself begin with, and the norms and the
    matrix around it, as ``MultiTokenPredictor`` has them."""

    layer: str
    embedding_norm: str
    state_norm: str
    projection: str
    final_norm: str


def predictor_names(folder: str | Path, shapes: ModelShapes) -> PredictorNames:
    """Returns the names of DeepSeek-V3, whose layer is numbered after the model's own, or those of Qwen3-Next in a folder that has them."""
    if _has_apart(folder):
        return PredictorNames("mtp.layers.0.", *(f"mtp.{name}.weight" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")))
    at = f"model.layers.{shapes.num_hidden_layers}."
    return PredictorNames(at, *(f"{at}{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")))


def _has_apart(folder: str | Path) -> bool:
    """Returns whether the layer has tensors apart from the model's, as in Qwen3-Next. A dry run has the description of a model of the Hub alone."""
    return any((Path(folder) / name).is_file() for name in (WEIGHTS, INDEX)) and any(name.startswith("mtp.") for name in tensor_names(folder))


def check_predictor(folder: str | Path, shapes: ModelShapes) -> None:
    """Raises ``UserError`` if the model of ``shapes`` in ``folder`` has no layer of multi-token prediction that is read, by its ``config.json`` and the names
    of its tensors."""
    config = read_json(Path(folder) / "config.json")
    count = config.get(LAYERS_KEY)
    if (not isinstance(count, int) or isinstance(count, bool) or count < 1) and not _has_apart(folder):
        raise UserError(
            f"speculative_config method is 'mtp' and model '{folder}' has {LAYERS_KEY} {str(count)[:40]}: no layer of multi-token prediction; choose method "
            "'ngram', 'suffix' or 'draft'"
        )
    if is_packed_config(config) or shapes.transformers is not None:
        what = "is quantized" if is_packed_config(config) else "is computed by transformers"
        raise UserError(f"speculative_config method is 'mtp' and model '{folder}' {what}, where no layer of multi-token prediction is read; use 'ngram'")


def layer_shapes(shapes: ModelShapes, shares_vocabulary: bool) -> ModelShapes:
    """Returns the shapes of the decoder that has the layer alone, with softmax attention; ``shares_vocabulary``: without embedding and head of its own."""
    experts = None if shapes.experts is None else replace(shapes.experts, dense_layers=())
    windows = shapes.layer_windows and (shapes.window(shapes.num_hidden_layers - 1),)
    # A decoder has an embedding; one row of it is the smallest.
    return replace(
        shapes, num_hidden_layers=1, linear_attention=None, experts=experts, layer_windows=windows, unrotated_layers=(), lora=None, value_head="none",
        tie_word_embeddings=False, language_head=not shares_vocabulary, vocab_size=1 if shares_vocabulary else shapes.vocab_size,
    )  # fmt: skip
