"""Reads the weights of a folder that bitsandbytes quantized: 4-bit NormalFloats (Dettmers et al., 2023, "QLoRA"), int8 (Dettmers et al., 2022, "LLM.int8()").

A 4-bit weight is one run of numbers, row after row, of which ``blocksize`` share a scale, whatever the rows' length; two are in a byte, the first in its
upper half. With double quantization the scales are codes of 8 bits, of which ``nested_blocksize`` share a scale. A row of int8 has the scale SCB / 127.
"""

import json
import math
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.quantized import INT8_MAX, NORMAL_FLOATS, QuantizedWeight
from tandem.model.quantization.checkpoint_tensors import Tensors, take
from tandem.model.quantization.formats import CheckpointFormat
from tandem.types import UserError


def read_four_bits(module: str, _: CheckpointFormat, tensors: Tensors, rows: int, columns: int, __: int) -> QuantizedWeight:
    """Returns the weight [N, K] of ``module`` from ``tensors``, removing what it reads. A group has as many columns as are in one block in every row."""
    name = f"{module}.weight"
    state = _read_state(name, tensors)
    size = _whole(state, "blocksize", name)
    if list(state.get("shape", ())) != [rows, columns]:
        raise UserError(f"tensor '{name}' was quantized with shape {state.get('shape')}; config.json requires {[rows, columns]}")
    blocks = math.ceil(rows * columns / size)
    numbers = take(f"{name}.quant_map", tensors, (16,)).float()
    if not torch.equal(numbers, numbers.new_tensor(NORMAL_FLOATS)):
        raise UserError(f"tensor '{name}.quant_map' has other numbers than the 4-bit NormalFloat; quantize the float model with bnb_4bit_quant_type nf4")
    packed = tensors.pop(name, torch.empty(0)).contiguous().flatten().view(torch.uint8)
    if len(packed) != math.ceil(rows * columns / 2):
        raise UserError(f"tensor '{name}' has {len(packed)} bytes; config.json requires {math.ceil(rows * columns / 2)}")
    codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten()[: rows * columns].view(rows, columns)
    scales, group = _scales(name, state, tensors, blocks), math.gcd(columns, size)
    starts = torch.arange(0, rows * columns, group, device=scales.device).view(rows, columns // group)
    return QuantizedWeight("nf4", codes.contiguous(), scales[starts // size].contiguous(), None, group)


def read_int8(module: str, _: CheckpointFormat, tensors: Tensors, rows: int, columns: int, __: int) -> QuantizedWeight:
    """Returns the weight [N, K] of ``module`` from ``tensors``, removing what it reads. Its inputs are not rounded: which columns LLM.int8() has in 16 bits
    depends on the other tokens of a batch."""
    codes = take(f"{module}.weight", tensors, (rows, columns))
    if codes.dtype != torch.int8:
        raise UserError(f"tensor '{module}.weight' is {codes.dtype}; config.json says int8")
    layout = tensors.pop(f"{module}.weight_format", torch.zeros(1)).flatten()
    if layout.tolist() != [0]:
        raise UserError(f"tensor '{module}.weight_format' is {layout.tolist()}; only 0 (rows) is supported: save the model again with a newer bitsandbytes")
    scales = take(f"{module}.SCB", tensors, (rows,)).float() / INT8_MAX
    return QuantizedWeight("int8", codes, scales.unsqueeze(1), None, columns)


def _read_state(name: str, tensors: Tensors) -> dict[str, Any]:
    kinds = [key for key in tensors if key.startswith(f"{name}.quant_state.bitsandbytes__")]
    if len(kinds) != 1 or not kinds[0].endswith("__nf4"):
        of = kinds[0].rpartition("__")[2] if kinds else "no quant_state"
        raise UserError(f"tensor '{name}' is of {of}; only nf4 is supported: quantize the float model with bnb_4bit_quant_type nf4")
    try:
        state = json.loads(bytes(tensors.pop(kinds[0]).cpu().to(torch.uint8).tolist()))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise UserError(f"tensor '{kinds[0]}' is not JSON; download the folder again")
    return state


def _scales(name: str, state: dict[str, Any], tensors: Tensors, blocks: int) -> Tensor:
    """Returns the scale of each block, fp32."""
    held = take(f"{name}.absmax", tensors, (blocks,))
    if "nested_blocksize" not in state:
        return held.float()
    size, offset = _whole(state, "nested_blocksize", name), state.get("nested_offset")
    if held.dtype != torch.uint8 or not isinstance(offset, float):
        raise UserError(f"tensor '{name}.absmax' is {held.dtype} with offset {offset!r}; double quantization has codes of 8 bits and an offset")
    numbers = take(f"{name}.nested_quant_map", tensors, (256,)).float()
    wider = take(f"{name}.nested_absmax", tensors, (math.ceil(blocks / size),)).float()
    return numbers[held.long()] * wider.repeat_interleave(size)[:blocks] + offset


def _whole(state: dict[str, Any], key: str, name: str) -> int:
    value = state.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"tensor '{name}' has {key} {value!r}; it must be a whole number of at least 1: download the folder again")
    return value
