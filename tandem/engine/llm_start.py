"""Checks and converts the options of an ``LLM`` before anything is loaded."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tandem.config.arguments import check_names
from tandem.config.engine import EngineArgs
from tandem.config.load import build
from tandem.config.vllm_names import DTYPES, ENGINE, NEUTRAL, QUANTIZED_FOLDERS, with_method
from tandem.layout.mesh_check import check_engine_ranks
from tandem.layout.shapes import ModelShapes
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError

_LOG = logging.getLogger(__name__)


def tell_of_long_frequencies(shapes: ModelShapes, max_model_len: int) -> None:
    """Warns of a context in which short sequences too have the frequencies of long ones (``ModelShapes.positions_in``)."""
    if max_model_len > (short := shapes.default_context):
        _LOG.warning(
            "max_model_len %d is above the %d tokens that the model's short rotary frequencies (longrope) are for: all sequences, short ones too, have the "
            "long ones, as in vLLM; set max_model_len to %d or less for the short ones",
            max_model_len, short, short,
        )  # fmt: skip


def engine_args(model: str | Path, tokenizer: str | Path | Tokenizer | None, given: Mapping[str, Any]) -> EngineArgs:
    """Returns the checked options of an ``LLM``. Raises ``UserError`` for an unknown name or an invalid value."""
    named = _of_engine_args(given)
    if isinstance(named.get("dtype"), torch.dtype):
        named["dtype"] = str(named["dtype"]).removeprefix("torch.")
    if named.get("quantization") in QUANTIZED_FOLDERS:
        raise UserError(f"LLM quantization is '{named['quantization']}', which is the format of a folder and recognised without it; leave it out")
    named = {name: _plain(value) for name, value in named.items()}
    if isinstance(dtype := named.get("dtype"), str):
        named["dtype"] = DTYPES.get(dtype, dtype)
    if isinstance(speculative := named.get("speculative_config"), Mapping):
        named["speculative_config"] = with_method(speculative)
    folder = None if tokenizer is None or isinstance(tokenizer, Tokenizer) else str(tokenizer)
    return build(EngineArgs, {**named, "model": str(model), "tokenizer": folder}, "engine")


def _of_engine_args(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that ``EngineArgs`` has. Raises ``UserError`` for a name that neither it nor vLLM has, and for one of vLLM with a value
    that has no place here."""
    fields = {field.name: field for field in dataclasses.fields(EngineArgs)}
    named = {}
    for name, value in given.items():
        if name in fields:
            # As in vLLM, None is the default.
            if value is not None or fields[name].default is None:
                named[name] = value
        elif name not in {*ENGINE, *NEUTRAL} or value not in (None, *NEUTRAL.get(name, ())):
            check_names("LLM", [name], fields, ENGINE)
    return named


def _plain(value: Any) -> Any:
    """Returns ``value`` with paths as text."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return str(value) if isinstance(value, Path) else value


def check_ranks(shapes: ModelShapes, args: EngineArgs) -> None:
    """Raises ``UserError`` if a model of ``shapes`` cannot be divided between the ranks of ``args`` on this machine."""
    size = args.tensor_parallel_size
    if size > 1 and args.device != "cpu" and size > torch.cuda.device_count():
        raise UserError(f"engine tensor_parallel_size is {size}; this machine has {torch.cuda.device_count()} GPUs")
    check_engine_ranks(shapes, size, args.deterministic, "engine tensor_parallel_size")


def check_device(device: str) -> None:
    """Raises ``UserError`` for a device that this machine does not have."""
    index = torch.device(device).index or 0
    if device != "cpu" and index >= torch.cuda.device_count():
        raise UserError(f"engine device is {device!r}; this machine has {torch.cuda.device_count()} CUDA devices, use one of them or 'cpu'")


def dtype_of(args: EngineArgs) -> torch.dtype:
    """Returns the dtype of weights and activations; ``auto`` is fp32."""
    name = "float32" if args.dtype == "auto" else args.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def tokenizer_of(given: str | Path | Tokenizer | None, model: str | Path) -> Tokenizer | None:
    """Returns the given tokenizer, else the model's own, or ``None`` if the model has none."""
    if isinstance(given, Tokenizer):
        return given
    if given is not None:
        return Tokenizer.from_folder(given)
    return Tokenizer.from_folder(model) if (Path(model) / "tokenizer.json").is_file() else None
