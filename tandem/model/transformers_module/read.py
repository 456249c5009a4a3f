"""The shapes of a model that a module of transformers computes. Imports no torch; transformers and torch are asked in a process of their own where they are
not imported yet."""

import hashlib
import importlib.util
import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from tandem.layout.shapes import ModelShapes
from tandem.layout.transformers_module import TransformersModule
from tandem.types import RunError, UserError

DESCRIBE = "tandem.model.transformers_module.describe"
_PLAIN = (
    "architecture", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "max_position_embeddings", "tie_word_embeddings", "gated_mlp", "score_cap",
)  # fmt: skip
"""The fields of ``ModelShapes`` that a module of transformers has."""


def read_module_shapes(folder: str | Path, trust_remote_code: bool) -> ModelShapes:
    """Returns the shapes of the model in ``folder`` for ``model.implementation: transformers``. Raises ``UserError`` if Tandem cannot train and serve it."""
    if importlib.util.find_spec("transformers") is None:
        raise UserError("'model.implementation' is 'transformers', which is not installed; pip install 'tandem-rl[transformers]'")
    path = Path(folder) / "config.json"
    try:
        content = path.read_bytes()
        config = json.loads(content)
    except (OSError, ValueError) as error:
        raise UserError(f"'{path}' cannot be read as JSON: {error}") from None
    if isinstance(config, dict) and config.get("quantization_config") is not None:
        raise UserError(f"model '{folder}' is quantized, which model.implementation 'transformers' does not read; use the float checkpoint")
    try:
        return _described(str(Path(folder).resolve()), hashlib.sha256(content).hexdigest(), trust_remote_code)
    except UserError as error:
        raise UserError(f"model '{folder}' cannot be computed by transformers (model.implementation) here: {error}") from None


@lru_cache(maxsize=16)
def _described(folder: str, digest: str, trust_remote_code: bool) -> ModelShapes:
    """``digest``: of ``config.json``, with which a description ends being valid."""
    if "torch" in sys.modules:
        from tandem.model.transformers_module.describe import describe

        return describe(folder, trust_remote_code)
    command = [sys.executable, "-m", DESCRIBE, folder, json.dumps(trust_remote_code)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        answer = json.loads(ended.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = (ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"])[-1]
        raise RunError(f"model '{folder}' could not be described by transformers: {last}") from None
    if "refused" in answer:
        raise UserError(answer["refused"])
    return from_json(answer)


def to_json(shapes: ModelShapes) -> dict[str, Any]:
    """Returns the shapes of a module of transformers as JSON has them."""
    module = shapes.transformers
    assert module is not None
    fields = {name: getattr(module, name) for name in TransformersModule.__dataclass_fields__}
    return {name: getattr(shapes, name) for name in _PLAIN} | {"layer_windows": shapes.layer_windows, "transformers": fields}


def from_json(content: dict[str, Any]) -> ModelShapes:
    """Returns the shapes that ``to_json`` has written."""
    fields = content["transformers"]
    module = TransformersModule(
        **{
            **fields,
            "parameters": tuple((name, tuple(shape)) for name, shape in fields["parameters"]),
            "names": tuple(fields["names"]),
            "attention": tuple(fields["attention"]),
            "ignored": tuple(fields["ignored"]),
        }
    )
    return ModelShapes(**{name: content[name] for name in _PLAIN}, layer_windows=tuple(content["layer_windows"]), transformers=module)
