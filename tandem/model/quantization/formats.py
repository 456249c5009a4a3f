"""Reads ``quantization_config`` of a Hugging Face folder: the format of its linear layers. Imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.model.huggingface.model_config import read_json
from tandem.types import UserError

Layout = Literal["awq", "gptq", "pack-quantized", "int-quantized", "float-quantized", "fp8", "nf4", "llm-int8"]
"""AWQ's GEMM layout, GPTQ's, three of compressed-tensors, DeepSeek's fp8 with block scales (which is decoded as it is read), and two of bitsandbytes."""
INT4_LAYOUTS = ("awq", "gptq", "pack-quantized")

SUPPORTED = "awq, gptq, compressed-tensors, fp8, bitsandbytes and mxfp4"
DECODED = ("mxfp4", "fp8")
"""Methods whose weights are decoded as they are read (``huggingface.stacked_experts``, ``fp8_blocks``), after which nothing sees that they were quantized."""


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """``group_size``: 0 for one scale per row. ``stored_zeros_are_one_less``: GPTQ's first version. ``block``: rows and columns that share
    a scale of fp8. ``ignored``: modules that are stored plain, by name or ``re:`` pattern."""

    layout: Layout
    group_size: int = 0
    symmetric: bool = True
    stored_zeros_are_one_less: bool = False
    block: tuple[int, int] | None = None
    rounds_inputs: bool = False
    ignored: tuple[str, ...] = ()

    def ignores(self, module: str) -> bool:
        """Returns whether ``module`` (a name without ``.weight``) is listed as stored plain."""
        for name in self.ignored:
            if name.startswith("re:"):
                if re.match(name[3:], module):
                    return True
            elif module == name or f".{name}." in f".{module}.":
                return True
        return False


def read_format(folder: str | Path) -> CheckpointFormat | None:
    """Returns the format of the folder's weights, ``None`` if they are plain, or decoded as they are read. Raises ``UserError`` for a format that is not
    supported."""
    path = Path(folder) / "config.json"
    content = read_json(path)
    if not is_packed_config(content):
        decoded_blocks(content, str(path))
        return None
    config = content["quantization_config"]
    if not isinstance(config, dict):
        raise UserError(f"'{path}' has quantization_config {config!r}; it must be an object")
    return format_of(config, str(path))


def is_packed_config(content: Mapping[str, Any]) -> bool:
    """Returns whether the content of a ``config.json`` is of a folder whose weights stay as they were quantized."""
    config = content.get("quantization_config")
    return config is not None and not (isinstance(config, dict) and config.get("quant_method") in DECODED)


def has_mxfp4(content: Mapping[str, Any]) -> bool:
    """Returns whether the content of a ``config.json`` is of a folder whose experts are in MXFP4."""
    config = content.get("quantization_config")
    return isinstance(config, dict) and config.get("quant_method") == "mxfp4"


def decoded_blocks(content: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """Returns the rows and columns that share a scale in a folder of fp8, whose ``config.json`` has ``content``; ``None`` for another. Raises ``UserError``
    for fp8 in a form that is not read; ``where`` names it."""
    config = content.get("quantization_config")
    return format_of(config, where).block if isinstance(config, dict) and config.get("quant_method") == "fp8" else None


def format_of(config: dict[str, Any], where: str) -> CheckpointFormat:
    """Returns the format that the content of a ``quantization_config`` describes; ``where`` names it in errors."""
    method = config.get("quant_method")
    if method is None and ("load_in_4bit" in config or "load_in_8bit" in config):
        method = "bitsandbytes"
    readers = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors, "fp8": _fp8, "bitsandbytes": _bitsandbytes}
    if method not in readers:
        raise UserError(f"'{where}' has quant_method {method!r}; supported are {SUPPORTED}; use such a checkpoint or the float one")
    return readers[method](config, where)


def _fail(where: str, name: str, value: Any, fix: str) -> UserError:
    return UserError(f"'{where}' has quantization_config {name} {value!r}; {fix}")


def _names(config: dict[str, Any], key: str) -> tuple[str, ...]:
    return tuple(str(name) for name in config.get(key) or ())


def _group_size(config: dict[str, Any], where: str) -> int:
    size = config.get("group_size", config.get("q_group_size", 128))
    if size in (None, -1):
        return 0
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise _fail(where, "group_size", size, "it must be a whole number of at least 1, or -1")
    return size


def _four_bits(config: dict[str, Any], key: str, where: str) -> None:
    bits = config.get(key, 4)
    if bits != 4:
        raise _fail(where, key, bits, "only 4 bits are supported; use a 4-bit checkpoint, or an 8-bit one of compressed-tensors")


def _awq(config: dict[str, Any], where: str) -> CheckpointFormat:
    _four_bits(config, "bits" if "bits" in config else "w_bit", where)
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise _fail(where, "version", version, "only the GEMM layout of AWQ is supported")
    return CheckpointFormat("awq", _group_size(config, where), symmetric=False, ignored=_names(config, "modules_to_not_convert"))


def _gptq(config: dict[str, Any], where: str) -> CheckpointFormat:
    _four_bits(config, "bits", where)
    version = config.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise _fail(where, "checkpoint_format", version, "supported are gptq and gptq_v2")
    return CheckpointFormat(
        "gptq", _group_size(config, where), bool(config.get("sym", True)), stored_zeros_are_one_less=version == "gptq",
        ignored=_names(config, "modules_to_not_convert"),
    )  # fmt: skip


def _fp8(config: dict[str, Any], where: str) -> CheckpointFormat:
    block = config.get("weight_block_size")
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise _fail(where, "weight_block_size", block, "it must be two whole numbers, usually [128, 128]")
    for key, known, fix in (("fmt", "e4m3", "only e4m3 is supported"), ("activation_scheme", "dynamic", "only dynamic scales of the inputs are supported")):
        if config.get(key, known) != known:
            raise _fail(where, key, config[key], fix)
    return CheckpointFormat("fp8", block=(block[0], block[1]))


def _bitsandbytes(config: dict[str, Any], where: str) -> CheckpointFormat:
    plain = _names(config, "llm_int8_skip_modules")
    if config.get("load_in_8bit"):
        return CheckpointFormat("llm-int8", ignored=plain)
    kind = config.get("bnb_4bit_quant_type", "fp4")
    if not config.get("load_in_4bit"):
        raise _fail(where, "load_in_4bit", config.get("load_in_4bit"), "it or load_in_8bit must be true")
    if kind != "nf4":
        raise _fail(where, "bnb_4bit_quant_type", kind, "only nf4 is supported; quantize the float model with it")
    return CheckpointFormat("nf4", ignored=plain)


def _compressed_tensors(config: dict[str, Any], where: str) -> CheckpointFormat:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _fail(where, "config_groups", list(groups or ()), "exactly one group is supported")
    group = next(iter(groups.values()))
    if not isinstance(group, dict) or group.get("targets") != ["Linear"]:
        raise _fail(where, "targets", group.get("targets") if isinstance(group, dict) else group, "only ['Linear'] is supported")
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    layout = group.get("format") or config.get("format")
    if layout not in ("pack-quantized", "int-quantized", "float-quantized"):
        raise _fail(where, "format", layout, "supported are pack-quantized, int-quantized and float-quantized")
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if (bits, kind) != {"pack-quantized": (4, "int"), "int-quantized": (8, "int"), "float-quantized": (8, "float")}[layout]:
        raise _fail(where, "weights", f"{bits} bits {kind}", f"{layout} is supported with 4 bits (pack), 8 bits (int) or 8 bits float")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise _fail(where, "strategy", strategy, "supported are tensor, channel, group and block")
    symmetric = weights.get("symmetric", True)
    if not symmetric and layout != "pack-quantized":
        raise _fail(where, "symmetric", symmetric, f"{layout} is supported with symmetric weights only")
    block = weights.get("block_structure") if strategy == "block" else None
    if isinstance(block, list) and len(block) != 2:
        raise _fail(where, "block_structure", block, "it must be two whole numbers")
    if inputs is not None:
        _check_inputs(inputs, layout, strategy, where)
    return CheckpointFormat(
        layout, _group_size(weights, where) if strategy == "group" else 0, bool(symmetric),
        block=(int(block[0]), int(block[1])) if block else None, rounds_inputs=inputs is not None, ignored=_names(config, "ignore"),
    )  # fmt: skip


def _check_inputs(inputs: dict[str, Any], layout: str, strategy: str, where: str) -> None:
    wanted = "float" if layout == "float-quantized" else "int"
    if inputs.get("num_bits") != 8 or inputs.get("type", "int") != wanted:
        kind = f"{inputs.get('num_bits')} bits {inputs.get('type', 'int')}"
        raise _fail(where, "input_activations", kind, f"{layout} is supported with plain inputs or 8 bits {wanted}")
    if not inputs.get("dynamic") or not inputs.get("symmetric", True):
        raise _fail(where, "input_activations", "static or asymmetric", "only dynamic, symmetric scales of the inputs are supported")
    per = inputs.get("strategy") or "token"
    if per != ("group" if strategy == "block" else "token"):
        raise _fail(where, "input_activations strategy", per, "supported are token, and group if the weights have blocks")
