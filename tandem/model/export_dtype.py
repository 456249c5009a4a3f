"""The dtype of the model that a run writes at its end."""

import torch

from tandem.config.model import ModelConfig
from tandem.model.huggingface.model_config import read_json
from tandem.model.model_source import found_model

_NAMES = ("float32", "float64", "bfloat16", "float16")


def export_dtype(model: ModelConfig, trained: str) -> torch.dtype:
    """Returns ``model.export_dtype``; ``auto`` is the dtype of the folder that the run was given, else that of the weights as they are ``trained``."""
    name: str = model.export_dtype
    # After the stage of fine-tuning a run does not need the folder that it was given.
    if name == "auto" and model.path is not None and (path := found_model(model.path) / "config.json").is_file():
        config = read_json(path)
        name = config.get("dtype") or config.get("torch_dtype") or trained
    dtype: torch.dtype = getattr(torch, name if name in _NAMES else trained)
    return dtype
