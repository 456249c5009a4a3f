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

from tandem.layout.shapes import ModelShapes, Multipliers
from tandem.layout.transformers_module import TransformersModule
from tandem.types import RunError, UserError

DESCRIBE = "tandem.model.transformers_module.describe"
_PLAIN = (
    "architecture", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "max_position_embeddings", "tie_word_embeddings", "gated_mlp", "score_cap", "logit_cap",
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
        state = _state_of(Path(folder), content, trust_remote_code)
    except OSError as error:
        raise UserError(f"model '{folder}' cannot be read: {error}; write or download it again") from None
    try:
        return _described(str(Path(folder).resolve()), state, trust_remote_code)
    except UserError as error:
        raise UserError(f"model '{folder}' cannot be computed by transformers (model.implementation) here: {error}") from None


def _state_of(folder: Path, config: bytes, trust_remote_code: bool) -> tuple[Any, ...]:
    """Returns what a description depends on: the bytes of ``config.json``, the code in ``folder`` where it may run, and its files of tensors, whose names are
    checked. Files of tensors are large, and known by their size and when they were written."""
    digest = hashlib.sha256(config)
    for path in sorted(folder.rglob("*.py")) if trust_remote_code else ():
        code = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(code)}\n".encode() + code)
    files = [(path.name, path.stat()) for path in sorted(folder.glob("*.safetensors"))]
    return digest.hexdigest(), *((name, status.st_ino, status.st_size, status.st_mtime_ns) for name, status in files)


@lru_cache(maxsize=16)
def _described(folder: str, state: tuple[Any, ...], trust_remote_code: bool) -> ModelShapes:
    """``state``: with which a description ends being valid."""
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
    return {name: getattr(shapes, name) for name in _PLAIN} | {
        "layer_windows": shapes.layer_windows, "logits_scaling": shapes.multipliers.logits_scaling, "transformers": fields,
    }  # fmt: skip


def from_json(content: dict[str, Any]) -> ModelShapes:
    """Returns the shapes that ``to_json`` has written."""
    fields = content["transformers"]
    module = TransformersModule(
        **{
            **fields,
            "parameters": tuple((name, tuple(shape)) for name, shape in fields["parameters"]),
            "names": tuple(fields["names"]),
            "starts": tuple(fields["starts"]),
            "attention": tuple(fields["attention"]),
            "linears": tuple(fields["linears"]),
            "routers": tuple(fields["routers"]),
            "expert_names": tuple(fields["expert_names"]),
            "loss_routers": tuple(fields["loss_routers"]),
            "ignored": tuple(fields["ignored"]),
        }
    )
    plain = {name: content[name] for name in _PLAIN}
    multipliers = Multipliers(logits_scaling=content["logits_scaling"])
    return ModelShapes(**plain, layer_windows=tuple(content["layer_windows"]), multipliers=multipliers, transformers=module)
