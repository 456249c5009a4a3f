"""The keyword arguments of ``LLM``, for type checkers and ``help``: the fields of ``EngineArgs``, and what vLLM's users give besides."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch

from tandem.config.engine import AttentionBackend, EngineArgs, EnginePrecision, ModelDtype, SpeculativeConfig
from tandem.config.implementation import ImplementationName
from tandem.config.pooling import Convert, PoolerConfig, Runner
from tandem.config.traces import TracesProtocol
from tandem.types.kv_cache import KVCacheDtype


class EngineOptions(TypedDict, total=False):
    """The fields of ``EngineArgs`` but ``model`` and ``tokenizer``, which describes them."""

    revision: str | None
    skip_tokenizer_init: bool
    generation_config: str
    override_generation_config: Mapping[str, Any] | None
    load_format: Literal["auto", "dummy"]
    model_impl: ImplementationName
    runner: Runner
    convert: Convert
    pooler_config: PoolerConfig | Mapping[str, Any] | None
    hf_overrides: Mapping[str, Any] | None
    verify: bool
    download_dir: str | Path | None
    weight_cache_gib: float
    dtype: ModelDtype | torch.dtype
    precision: EnginePrecision
    quantization: str | None
    device: str
    kernels: Literal["auto", "cpu", "reference", "triton"]
    attention: AttentionBackend
    deterministic: bool
    seed: int | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_prefill_slowdown: float | None
    batching: Literal["static", "dynamic", "continuous"]
    enable_chunked_prefill: bool | None
    enable_prefix_caching: bool | None
    cache_implementation: Literal["paged", "static"]
    kv_cache_tokens: int
    kv_cache_dtype: KVCacheDtype
    preemption_mode: Literal["auto", "swap", "recompute"]
    swap_space: float
    watermark: float
    tensor_parallel_size: int
    rank_timeout_s: float
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None
    async_scheduling: bool | None
    enforce_eager: bool
    otlp_traces_endpoint: str | None
    otlp_traces_protocol: TracesProtocol
    gpu_memory_utilization: float | None
    trust_remote_code: bool


def whole_signature(construct: Callable[..., None]) -> inspect.Signature:
    """Returns the signature of ``construct``, a constructor with ``**options``, with the fields of ``EngineArgs`` in their place."""
    parameters = [p for p in inspect.signature(construct).parameters.values() if p.name != "self" and p.kind is not p.VAR_KEYWORD]
    named, hints = {p.name for p in parameters}, typing.get_type_hints(EngineArgs)
    for field in dataclasses.fields(EngineArgs):
        if field.name not in named:
            parameters.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]))
    return inspect.Signature(parameters)
