"""Tandem: reinforcement-learning post-training of language models."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "LLM": "tandem.engine.llm",
    "LoRARequest": "tandem.engine.lora.request",
    "SamplingParams": "tandem.engine.sample.sampling_params",
    "StructuredOutputsParams": "tandem.engine.structured_output.params",
    "load_config": "tandem.config.recipe",
    "train": "tandem.jobs.start",
}
"""Public names by module: imported on first use, so that ``import tandem`` loads no torch."""

__all__ = ["LLM", "LoRARequest", "SamplingParams", "StructuredOutputsParams", "__version__", "load_config", "train"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
