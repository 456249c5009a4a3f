"""What is known of a draft head before it is loaded: whether it belongs to the model, and the memory of it and of a draft model."""

from pathlib import Path
from typing import NamedTuple

from tandem.config.engine import SpeculativeConfig
from tandem.estimate.model_bytes import kv_bytes_per_token
from tandem.layout.eagle3 import EMBEDDING, Eagle3Shapes, eagle3_parameters
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes
from tandem.model.huggingface.eagle3_config import read_eagle3_of
from tandem.model.huggingface.hub import INDEX, WEIGHTS
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.multi_token_config import check_predictor, layer_shapes
from tandem.model.huggingface.weight_files import tensor_names
from tandem.model.model_source import commit_of, found_model
from tandem.types import UserError
from tandem.types.dtypes import DTYPE_BYTES


class DraftSize(NamedTuple):
    """The bytes of the weights, and of the keys and values of one token."""

    weights: int = 0
    token: int = 0


def check_head(speculative: SpeculativeConfig, folder: Path, shapes: ModelShapes, head: Path) -> Eagle3Shapes | None:
    """Returns the shapes of the EAGLE-3 head in ``head``, for ``eagle3``. Raises ``UserError`` if the model of ``shapes`` in ``folder`` lacks the draft head of
    ``speculative``, or it belongs to another one."""
    if speculative.method == "mtp":
        check_predictor(folder, shapes)
    if speculative.method != "eagle3":
        return None
    if shapes.transformers is not None:
        raise UserError("speculative_config method is 'eagle3' and the model is computed by transformers, which gives no hidden states; use 'ngram'")
    checked = read_eagle3_of(head, shapes, own_embedding=True)
    if commit_of(head) is not None and not any((head / name).is_file() for name in (WEIGHTS, INDEX)):
        # A dry run has the description of a model of the Hub alone.
        return checked
    return checked if EMBEDDING in tensor_names(head) else read_eagle3_of(head, shapes, own_embedding=False)


def draft_size(speculative: SpeculativeConfig | None, folder: Path, shapes: ModelShapes, dtype: str, has_ranks: bool) -> DraftSize:
    """Returns what the draft of the model of ``shapes`` in ``folder`` takes, in ``dtype``. ``has_ranks``: the model is divided between ranks, so that a head
    has an embedding of its own. Raises ``UserError`` for a folder that cannot be one, as ``check_head``."""
    each = DTYPE_BYTES[dtype]
    if speculative is None or speculative.method in ("ngram", "suffix"):
        return DraftSize()
    source = found_model(str(speculative.model)) if speculative.model is not None else folder
    head = check_head(speculative, folder, shapes, source)
    if speculative.method == "mtp":
        layer = layer_shapes(shapes, not has_ranks)
        return DraftSize(each * (parameter_count(layer) + 2 * shapes.hidden_size**2), kv_bytes_per_token(layer, dtype))
    if head is not None:
        table = 0 if head.own_embedding or not has_ranks else shapes.vocab_size * shapes.hidden_size
        return DraftSize(each * (sum(p.numel for p in eagle3_parameters(head)) + table), kv_bytes_per_token(head.layer, dtype))
    draft = read_shapes(source)
    return DraftSize(each * parameter_count(draft), kv_bytes_per_token(draft, dtype))
