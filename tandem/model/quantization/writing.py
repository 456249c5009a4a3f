"""Writes quantized weights as the tensors and the ``quantization_config`` of existing checkpoint formats."""

import re
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from tandem.kernels.quantized import QuantizedWeight
from tandem.layout.expert_shapes import SHARED_GATE
from tandem.layout.latent_attention import WITHIN_HEADS
from tandem.layout.linear_attention import GATES
from tandem.layout.shapes import ModelShapes
from tandem.model.quantization.bits import AWQ_ORDER, pack_words

Method = Literal["int8", "fp8", "rtn", "gptq", "awq"]
CALIBRATED: tuple[Method, ...] = ("gptq", "awq")


def left_plain(shapes: ModelShapes) -> tuple[str, ...]:
    """Returns what the names of the layers' linear modules end with that stay as they are: routers, the gate of shared experts, the matrix that latent
    attention multiplies head by head, and the gates of linear attention, whose products decays exponentiate; Qwen's own folders in fp8 leave them so too."""
    experts = () if shapes.experts is None else (shapes.experts.names.router, *((SHARED_GATE.removesuffix(".weight"),) if shapes.experts.shared_gate else ()))
    latent = () if shapes.latent is None else (f"self_attn.{WITHIN_HEADS}",)
    linear = () if shapes.linear_attention is None else (f"linear_attn.{GATES}",)
    return (*experts, *latent, *linear)


def stored_tensors(method: Method, module: str, weight: QuantizedWeight) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of ``module``. int8, fp8: codes and scales of compressed-tensors; rtn: its packed int4; gptq and awq: theirs, with
    scales in fp16."""
    assert weight.scales is not None
    scales = weight.scales
    if method in ("int8", "fp8"):
        yield f"{module}.weight", weight.codes
        yield f"{module}.weight_scale", scales
        return
    assert weight.zeros is not None
    zeros = weight.zeros.to(torch.uint8)
    if method == "rtn":
        yield f"{module}.weight_packed", pack_words(weight.codes)
        yield f"{module}.weight_scale", scales
        yield f"{module}.weight_shape", torch.tensor(weight.codes.shape)
    elif method == "awq":
        yield f"{module}.qweight", pack_words(weight.codes.t(), AWQ_ORDER)
        yield f"{module}.qzeros", pack_words(zeros.t(), AWQ_ORDER)
        yield f"{module}.scales", scales.t().half()
    else:
        codes, index = weight.codes, torch.arange(weight.columns, dtype=torch.int32) // weight.group_size
        if weight.order is not None:
            # Restores the order of the inputs, each of which has the index of its group.
            codes = torch.empty_like(codes).index_copy_(1, weight.order, codes)
            index = torch.empty_like(index).index_copy_(0, weight.order, index)
        yield f"{module}.qweight", pack_words(codes).t()
        yield f"{module}.qzeros", pack_words(((zeros.int() - 1) & 15).to(torch.uint8).t())
        yield f"{module}.scales", scales.t().half()
        yield f"{module}.g_idx", index


def quantization_config(method: Method, group_size: int, act_order: bool, damping: float, plain: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the ``quantization_config`` as the format's own tools write it. ``plain``: see ``left_plain``; the modules themselves for ``awq``,
    whose readers look for parts of names."""
    size = group_size or -1
    if method == "awq":
        return {
            "quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": list(plain) or None,
        }  # fmt: skip
    if method == "gptq":
        return {
            "quant_method": "gptq", "checkpoint_format": "gptq", "bits": 4, "group_size": size, "sym": True, "desc_act": act_order,
            "damp_percent": damping, "static_groups": False, "true_sequential": True, "lm_head": False,
            # As GPTQModel names modules that it leaves as they are.
            **({"dynamic": {f"-:.*{re.escape(name)}$": {} for name in plain}} if plain else {}),
        }  # fmt: skip
    kind = "float" if method == "fp8" else "int"
    grouped = method == "rtn" and group_size > 0
    weights: dict[str, Any] = {
        "num_bits": 4 if method == "rtn" else 8, "type": kind, "symmetric": True, "strategy": "group" if grouped else "channel",
        "group_size": group_size if grouped else None, "dynamic": False, "actorder": None, "block_structure": None,
        "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    inputs = None
    if method != "rtn":
        inputs = {
            "num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "group_size": None, "dynamic": True, "actorder": None,
            "block_structure": None, "observer": None, "observer_kwargs": {},
        }  # fmt: skip
    layout = {"rtn": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}[method]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None, "format": layout}
    ignored = [f"re:.*{re.escape(name)}$" for name in plain]
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}, "ignore": ["lm_head", *ignored],
        "kv_cache_scheme": None, "quantization_status": "compressed", "global_compression_ratio": None,
    }  # fmt: skip
