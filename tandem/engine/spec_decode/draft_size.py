"""The memory of a draft model or head, before it is loaded."""

from typing import NamedTuple

from tandem.config.engine import SpeculativeConfig
from tandem.estimate.model_bytes import kv_bytes_per_token
from tandem.layout.eagle3 import eagle3_parameters
from tandem.layout.shapes import ModelShapes, parameter_count
from tandem.model.huggingface.eagle3_config import read_eagle3_of
from tandem.model.huggingface.model_folder import read_shapes
from tandem.model.model_source import find_model
from tandem.model.multi_token import layer_shapes
from tandem.types.dtypes import DTYPE_BYTES


class DraftSize(NamedTuple):
    """The bytes of the weights, and of the keys and values of one token."""

    weights: int = 0
    token: int = 0


def draft_size(speculative: SpeculativeConfig | None, shapes: ModelShapes, dtype: str, has_ranks: bool) -> DraftSize:
    """Returns what the draft of a model of ``shapes`` takes, in ``dtype``. ``has_ranks``: the model is divided between ranks, so that a head has an embedding
    of its own. Raises ``UserError`` for a folder that cannot be one."""
    each = DTYPE_BYTES[dtype]
    if speculative is None or speculative.method in ("ngram", "suffix"):
        return DraftSize()
    table = shapes.vocab_size * shapes.hidden_size * has_ranks
    if speculative.method == "mtp":
        layer = layer_shapes(shapes, not has_ranks)
        return DraftSize(each * (parameter_count(layer) + 2 * shapes.hidden_size**2), kv_bytes_per_token(layer, dtype))
    folder = find_model(str(speculative.model))
    if speculative.method == "eagle3":
        head = read_eagle3_of(folder, shapes, own_embedding=True)
        return DraftSize(each * (sum(p.numel for p in eagle3_parameters(head)) + table), kv_bytes_per_token(head.layer, dtype))
    draft = read_shapes(folder)
    return DraftSize(each * parameter_count(draft), kv_bytes_per_token(draft, dtype))
