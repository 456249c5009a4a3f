"""Reads the settings of a ``Dense`` module of Sentence Transformers: a linear layer and an activation function after the pooling. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tandem.model.huggingface.model_config import read_json
from tandem.types import UserError

Activation = Literal["Identity", "Tanh", "ReLU", "Sigmoid", "GELU", "SiLU"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class DenseModule:
    """``folder``: of its weights, ``linear.weight`` [out, in] and with ``has_bias`` ``linear.bias`` [out]."""

    folder: Path
    in_features: int
    out_features: int
    has_bias: bool
    activation: Activation


def read_dense(folder: Path) -> DenseModule:
    """Returns the module in ``folder``. Raises ``UserError`` for one that is broken or not supported."""
    path = folder / "config.json"
    config = read_json(path)
    inputs, outputs = (_size(config, name, path) for name in ("in_features", "out_features"))
    kind = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    activation = next((known for known in ACTIVATIONS if known == kind), None)
    if activation is None:
        raise UserError(f"'{path}' has the activation_function {kind[:60]!r}; supported are torch's {', '.join(ACTIVATIONS)}")
    if config.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise UserError(f"'{path}' has module_input_name {str(config['module_input_name'])[:60]!r}; a Dense module of the whole text's vector is supported")
    if not (folder / WEIGHTS).is_file():
        pickled = " (pytorch_model.bin is a pickle, which is never read)" if (folder / "pytorch_model.bin").is_file() else ""
        raise UserError(f"'{folder}' has no {WEIGHTS}{pickled}; save the model with safe_serialization")
    return DenseModule(folder, inputs, outputs, config.get("bias", True) is not False, activation)


def _size(config: Mapping[str, Any], name: str, path: Path) -> int:
    size = config.get(name)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UserError(f"'{path}' has {name} {str(size)[:40]}; it must be a whole number of at least 1")
    return size
