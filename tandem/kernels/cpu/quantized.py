"""Quantized weights for the C++ kernels: integer products in ``int8.cpp`` and ``int4.cpp``, products with decoded weights in ``coded.cpp``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.cpu.calls import dense, indices, shape_error
from tandem.kernels.cpu.large_pages import side_by_side, weight_memory
from tandem.kernels.cpu.library import Library
from tandem.kernels.quantized import (
    CODE_DTYPES,
    PackedQuantized,
    QuantizedWeight,
    check_integer_columns,
    in_order_of_codes,
    keep_codes,
    plain_weight,
    round_inputs,
)

KINDS = {"int4": 0, "int8": 1, "float8_e4m3": 2, "bfloat16": 3, "float16": 4, "nf4": 5, "mxfp4": 6}
"""The codes of coded.cpp."""
_PANEL = 64


class QuantizedCalls:
    """Packing and products of quantized weights."""

    def __init__(self, library: Library) -> None:
        self._c = library

    def pack(self, weight: QuantizedWeight) -> PackedQuantized:
        plain = keep_codes(weight)
        rows, columns = plain.rows, plain.columns
        codes = plain.data.contiguous()
        if plain.is_integer_product:
            assert plain.scales is not None
            check_integer_columns(columns)
            if plain.kind == "int4":
                data = weight_memory(self._c.int4_packed_bytes(rows, columns))
                self._c.int4_pack(codes.data_ptr(), rows, columns, data.data_ptr())
                zeros = None if plain.zeros is None else plain.zeros.to(torch.uint8)
                return plain._replace(data=data, scales=_by_panel(plain.scales), zeros=_by_panel(zeros))
            data = weight_memory(self._c.int8_packed_bytes(rows, columns))
            self._c.int8_pack(codes.data_ptr(), rows, columns, data.data_ptr())
            return plain._replace(data=data, scales=plain.scales.flatten().contiguous())
        kind = KINDS[plain.kind]
        data = weight_memory(self._c.coded_bytes(kind, rows, columns))
        self._c.coded_pack(kind, codes.data_ptr(), rows, columns, data.data_ptr())
        scales = plain.scales
        if plain.kind == "mxfp4" and scales is not None:
            # E8M0: the exponent of a power of two as fp32 has it.
            scales = (scales.view(torch.int32) >> 23).to(torch.uint8)
        return plain._replace(data=data, scales=_by_panel(scales), zeros=_by_panel(plain.zeros))

    def linear(self, x: Tensor, weight: PackedQuantized, bias: Tensor | None) -> Tensor:
        rows, width = x.shape
        if width != weight.columns:
            raise shape_error("linear x", x, f"[T, {weight.columns}]")
        out = x.new_empty(rows, weight.rows)
        at_bias = 0 if bias is None else dense(bias).data_ptr()
        if weight.is_integer_product:
            assert weight.scales is not None
            if weight.kind == "int4":
                x = dense(in_order_of_codes(x, weight))
                zeros = 0 if weight.zeros is None else weight.zeros.data_ptr()
                self._c.int4_linear(
                    x.data_ptr(), weight.data.data_ptr(), weight.scales.data_ptr(), zeros, weight.group_size, at_bias, rows, weight.rows, width,
                    out.data_ptr(),
                )  # fmt: skip
                return out
            self._c.int8_linear(
                x.data_ptr(), weight.data.data_ptr(), weight.scales.data_ptr(), at_bias, rows, weight.rows, width, out.data_ptr()
            )
            return out
        x = self._inputs(x, weight)
        at = [0 if held is None else held.data_ptr() for held in (weight.scales, weight.zeros)]
        self._c.coded_linear(
            x.data_ptr(), KINDS[weight.kind], weight.data.data_ptr(), *at, weight.group_size, at_bias, rows, weight.rows, width,
            out.data_ptr(),
        )  # fmt: skip
        return out

    def grouped_linear(self, x: Tensor, weight: PackedQuantized, bounds: Tensor) -> Tensor:
        """Computes ``Kernels.grouped_linear_packed``."""
        groups, bounds = len(weight.data), indices(bounds, torch.int64)
        if x.dim() != 2 or x.shape[1] != weight.columns:
            raise shape_error("grouped_linear x", x, f"[R, {weight.columns}]")
        if bounds.shape[0] != groups + 1 or int(bounds[-1]) != x.shape[0]:
            raise ValueError(f"grouped_linear bounds are {bounds.tolist()}; expected {groups + 1} numbers up to {x.shape[0]}")
        out = x.new_empty(x.shape[0], weight.rows)
        at = [0 if held is None else held.data_ptr() for held in (weight.scales, weight.zeros)]
        strides = [0 if held is None else held[0].nbytes for held in (weight.scales, weight.zeros)]
        if weight.is_integer_product and weight.kind == "int4":
            x = dense(in_order_of_codes(x, weight, bounds))
            self._c.int4_grouped_linear(
                x.data_ptr(), weight.data.data_ptr(), weight.data.stride(0), at[0], strides[0], at[1], strides[1], weight.group_size,
                bounds.data_ptr(), groups, weight.rows, weight.columns, out.data_ptr(),
            )  # fmt: skip
            return out
        if weight.is_integer_product:
            assert weight.scales is not None
            self._c.int8_grouped_linear(
                x.data_ptr(), weight.data.data_ptr(), weight.data.stride(0), weight.scales.data_ptr(), bounds.data_ptr(), groups, weight.rows,
                weight.columns, out.data_ptr(),
            )  # fmt: skip
            return out
        x = self._inputs(x, weight, bounds)
        self._c.coded_grouped_linear(
            x.data_ptr(), KINDS[weight.kind], weight.data.data_ptr(), weight.data.stride(0), at[0], strides[0], at[1], strides[1],
            weight.group_size, bounds.data_ptr(), groups, weight.rows, weight.columns, out.data_ptr(),
        )  # fmt: skip
        return out

    def _inputs(self, x: Tensor, weight: PackedQuantized, bounds: Tensor | None = None) -> Tensor:
        if weight.inputs != "float8_e4m3":
            return dense(round_inputs(x, weight, bounds))
        x = dense(in_order_of_codes(x, weight, bounds))
        out = torch.empty_like(x)
        group = weight.input_group or x.shape[1]
        self._c.round_fp8(x.data_ptr(), *x.shape, group, out.data_ptr())
        return out

    def unpack(self, weight: PackedQuantized) -> Tensor:
        """Returns the weight [N, K] in fp32, as ``linear`` decodes it; not of a product in integers."""
        assert not weight.is_integer_product
        panels = -(-weight.rows // _PANEL)
        data = weight.data.view(panels, weight.columns, -1)
        if weight.kind in ("int4", "nf4", "mxfp4"):
            codes = torch.cat([data & 15, data >> 4], dim=2)
        else:
            codes = data.view(CODE_DTYPES[weight.kind])

        def by_row(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.transpose(1, 2).reshape(panels * _PANEL, -1)[: weight.rows]

        plain = by_row(codes)
        assert plain is not None
        scales = by_row(weight.scales)
        if weight.kind == "mxfp4" and scales is not None:
            scales = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
        return plain_weight(QuantizedWeight(weight.kind, plain, scales, by_row(weight.zeros), weight.group_size, weight.order))


def side_by_side_weights(weights: Sequence[Any]) -> list[Any]:
    """Returns the packed ``weights`` with the memory of the quantized ones side by side; others stay where they are."""
    quantized = [weight for weight in weights if isinstance(weight, PackedQuantized)]
    held = [tensor for weight in quantized for tensor in (weight.data, weight.scales, weight.zeros) if tensor is not None]
    moved = iter(side_by_side(held))

    def own(x: Tensor | None) -> Tensor | None:
        return None if x is None else next(moved)

    # In the order in which they were taken.
    return [
        weight._replace(data=next(moved), scales=own(weight.scales), zeros=own(weight.zeros)) if isinstance(weight, PackedQuantized) else weight
        for weight in weights
    ]


def _by_panel(x: Tensor | None) -> Tensor | None:
    """Rearranges ``x[N, G]`` as [panel][G][64], padded with zeros."""
    if x is None:
        return None
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % _PANEL))
    return padded.view(-1, _PANEL, x.shape[1]).transpose(1, 2).contiguous()
