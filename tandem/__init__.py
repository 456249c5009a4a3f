"""Reinforcement-learning post-training of language models in which training and inference share the same accelerators.

Training, from a recipe (``docs/recipes.md`` has all keys)::

    from tandem import train

    result = train("sort")                    # or a YAML file, a mapping, or what load_config returns
    result.metrics.to_pandas()

Inference, with vLLM's names and meanings::

    from tandem import LLM, SamplingParams

    llm = LLM(result.model)
    outputs = llm.generate(["3142="], SamplingParams(temperature=0))
    print(outputs[0].outputs[0].text)

``import tandem`` loads no torch: each name is imported on first use.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.config.engine import EngineArgs
    from tandem.config.recipe import load_config
    from tandem.engine.llm import LLM
    from tandem.engine.lora.request import LoRARequest
    from tandem.engine.pooling.outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from tandem.engine.pooling.params import PoolingParams
    from tandem.engine.processing.outputs import CompletionOutput, RequestOutput
    from tandem.engine.sample.sampling_params import RequestOutputKind, SamplingParams
    from tandem.engine.structured_output.params import StructuredOutputsParams
    from tandem.jobs.result import RunResult
    from tandem.jobs.start import resume, train
    from tandem.runtime.callback import Callback
    from tandem.serving.async_llm import AsyncLLM
    from tandem.types.errors import RunError, UserError

__version__ = "0.1.0"

# torch warns of this when it is imported without NumPy, which Tandem does not need.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

__all__ = [
    "LLM",
    "AsyncLLM",
    "Callback",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LoRARequest",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "RunError",
    "RunResult",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "UserError",
    "__version__",
    "load_config",
    "resume",
    "train",
]

_MODULES = {
    "LLM": "tandem.engine.llm",
    "AsyncLLM": "tandem.serving.async_llm",
    "Callback": "tandem.runtime.callback",
    "ClassificationRequestOutput": "tandem.engine.pooling.outputs",
    "CompletionOutput": "tandem.engine.processing.outputs",
    "EmbeddingRequestOutput": "tandem.engine.pooling.outputs",
    "EngineArgs": "tandem.config.engine",
    "LoRARequest": "tandem.engine.lora.request",
    "PoolingParams": "tandem.engine.pooling.params",
    "PoolingRequestOutput": "tandem.engine.pooling.outputs",
    "RequestOutput": "tandem.engine.processing.outputs",
    "RequestOutputKind": "tandem.engine.sample.sampling_params",
    "RunError": "tandem.types.errors",
    "RunResult": "tandem.jobs.result",
    "SamplingParams": "tandem.engine.sample.sampling_params",
    "ScoringRequestOutput": "tandem.engine.pooling.outputs",
    "StructuredOutputsParams": "tandem.engine.structured_output.params",
    "UserError": "tandem.types.errors",
    "load_config": "tandem.config.recipe",
    "resume": "tandem.jobs.start",
    "train": "tandem.jobs.start",
}
_ELSEWHERE = {
    "AsyncEngineArgs": "EngineArgs, for LLM and AsyncLLM alike",
    "AsyncLLMEngine": "AsyncLLM",
    "LLMEngine": "LLM, whose attribute 'engine' is the engine",
    "TextPrompt": "a mapping: {'prompt': ...}",
    "TokensPrompt": "a mapping: {'prompt_token_ids': [...]}",
    "GuidedDecodingParams": "StructuredOutputsParams",
    "GRPOTrainer": "train(recipe)",
    "GRPOConfig": "a recipe; 'tandem recipes sort' prints one to edit",
    "SFTTrainer": "train(recipe) with 'algorithm: {name: sft}'; 'tandem recipes sft' prints one to edit",
    "TrainerCallback": "Callback",
}
"""Names of vLLM and TRL, and what has their place."""

if not TYPE_CHECKING:
    # A type checker that saw it would accept every name.
    def __getattr__(name: str) -> object:
        if name in _ELSEWHERE:
            # `from tandem import NAME` hides the text of an AttributeError.
            raise ImportError(f"tandem has no {name}; use {_ELSEWHERE[name]}")
        if name not in _MODULES:
            raise AttributeError(f"module 'tandem' has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
