"""Converts the ``config.json`` of an EAGLE-3 head, as SpecForge writes and vLLM and SGLang read it, to and from ``Eagle3Shapes``. Imports no torch."""

from pathlib import Path
from typing import Any

from tandem.layout.eagle3 import Eagle3Shapes, default_aux_layers
from tandem.layout.shapes import ModelShapes
from tandem.model.huggingface.config_reader import ConfigReader
from tandem.model.huggingface.model_config import EAGLE3_CLASS, config_json, read_json, shapes_of
from tandem.types import UserError

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_OWN_KEYS = ("architectures", "draft_vocab_size", "target_hidden_size", "eagle_config", LAYER_IDS, "norm_before_residual", "auto_map", "pretraining_tp")


def read_eagle3_of(folder: str | Path, target: ModelShapes, *, own_embedding: bool) -> Eagle3Shapes:
    """Returns the shapes of the head in ``folder``. Raises ``UserError`` for a folder without one, and for a head that cannot be one of ``target``."""
    shapes = read_eagle3_shapes(folder, own_embedding=own_embedding, target_layers=target.num_hidden_layers)
    for name, own, of_target in (
        ("vocab_size", shapes.layer.vocab_size, target.vocab_size),
        ("target_hidden_size", shapes.target_hidden_size, target.hidden_size),
        *([] if shapes.own_embedding else [("hidden_size", shapes.layer.hidden_size, target.hidden_size)]),
    ):
        if own != of_target:
            raise UserError(f"draft head '{folder}' has {name} {own} and the model {of_target}; name a head that was trained for this model")
    if max(shapes.aux_layers) >= target.num_hidden_layers:
        raise UserError(
            f"draft head '{folder}' reads the input of layer {max(shapes.aux_layers)}, and the model has {target.num_hidden_layers} layers from 0 on; name a "
            "head that was trained for this model"
        )
    return shapes


def read_eagle3_shapes(folder: str | Path, *, own_embedding: bool = False, target_layers: int = 0) -> Eagle3Shapes:
    """Returns the shapes of the head in ``folder``. ``target_layers``: of its target, where the folder does not say which of them it reads, which are
    vLLM's then. Raises ``UserError`` for a folder without one."""
    path = Path(folder) / "config.json"
    config, where = read_json(path), str(path)
    if (named := config.get("architectures")) != [EAGLE3_CLASS]:
        raise UserError(f"'{where}' has architectures {named}; name the folder of an EAGLE-3 head ({EAGLE3_CLASS})")
    layer = shapes_of({key: value for key, value in config.items() if key not in _OWN_KEYS} | {"model_type": "llama", "tie_word_embeddings": False}, where)
    if layer.num_hidden_layers != 1:
        raise UserError(f"'{where}' has num_hidden_layers {layer.num_hidden_layers}; a head with one layer is computed")
    read = ConfigReader(config, where)
    try:
        return Eagle3Shapes(
            layer,
            read.integer("target_hidden_size", layer.hidden_size),
            read.integer("draft_vocab_size", layer.vocab_size),
            _aux_layers(config, where, target_layers),
            own_embedding,
            read.boolean("norm_before_residual", False),
        )
    except ValueError as error:
        raise UserError(f"'{where}': {error}") from None


def _aux_layers(config: dict[str, Any], where: str, target_layers: int) -> tuple[int, ...]:
    """Returns the target's layers as vLLM counts them. ``eagle_config`` has those of SpecForge and SGLang, whose j is the output of layer j."""
    given, eagle = config.get(LAYER_IDS), config.get("eagle_config")
    from_outputs = 0
    if given is None and isinstance(eagle, dict):
        given, from_outputs = eagle.get(LAYER_IDS), 1
    if given is None and target_layers:
        return default_aux_layers(target_layers)
    if not isinstance(given, list) or not all(isinstance(layer, int) for layer in given):
        raise UserError(f"'{where}' has no list {LAYER_IDS}, by which a head says which layers of its target it reads; add it (the output of layer j is j + 1)")
    return tuple(layer + from_outputs for layer in given)


def eagle3_config_json(shapes: Eagle3Shapes) -> dict[str, Any]:
    """Returns the content of the head's ``config.json``."""
    return config_json(shapes.layer) | {
        "architectures": [EAGLE3_CLASS],
        "target_hidden_size": shapes.target_hidden_size,
        "draft_vocab_size": shapes.draft_vocab_size,
        "norm_before_residual": shapes.norm_before_residual,
        LAYER_IDS: list(shapes.aux_layers),
        # A layer's input is the output of the layer before it; the embedding is that of layer -1.
        "eagle_config": {LAYER_IDS: [layer - 1 for layer in shapes.aux_layers], "use_aux_hidden_state": True},
    }
