"""Packed weights of kernel sets that use plain layouts: packing is a copy."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.api import PackedGroups, PackedWeight, gate_of
from tandem.kernels.quantized import (
    PackedParts,
    PackedQuantized,
    QuantizedWeight,
    dequantize,
    integer_groups,
    integer_linear,
    keep_codes,
    of_groups,
    plain_weight,
    round_inputs,
    with_parts,
)
from tandem.layout.shapes import Activation


class PlainPacking:
    """The packed half of the interface of ``api``, based on the kernel set's own plain products. No gradients."""

    multiplies_coded_groups = True

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def grouped_linear(self, x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
        raise NotImplementedError

    def pack(self, weight: Tensor) -> PackedWeight:
        return PackedWeight(weight.detach().clone(memory_format=torch.contiguous_format), *weight.shape)

    def packed_rows(self, rows: Tensor, weight: PackedWeight) -> Tensor:
        return weight.data[rows]

    def pack_elements(self, weight: PackedWeight, rows: Tensor, columns: Tensor, values: Tensor) -> bool:
        """See ``Kernels.pack_elements``."""
        weight.data.view(-1)[rows * weight.columns + columns] = values
        return True

    def pack_quantized(self, weight: QuantizedWeight) -> PackedQuantized:
        return keep_codes(weight)

    def unpack_quantized(self, weight: PackedQuantized) -> Tensor:
        return plain_weight(weight)

    def linear_packed(
        self, x: Tensor, weight: PackedWeight | PackedQuantized | PackedParts, bias: Tensor | None
    ) -> Tensor:
        with torch.no_grad():
            if isinstance(weight, PackedWeight):
                return self.linear(x, weight.data, bias)
            if isinstance(weight, PackedParts):
                return with_parts(self.linear_packed, x, weight, bias)
            if weight.is_integer_product:
                return integer_linear(x, weight, bias)
            return self.linear(round_inputs(x, weight), dequantize(weight).to(x.dtype), bias)

    def gated_mlp_packed(
        self, x: Tensor, gate_up: PackedWeight, gate_up_bias: Tensor | None, down: PackedWeight, down_bias: Tensor | None, activation: Activation = "silu"
    ) -> Tensor:
        kernels: Any = self
        with torch.no_grad():
            return self.linear_packed(gate_of(kernels, activation)(self.linear_packed(x, gate_up, gate_up_bias)), down, down_bias)

    def pack_groups(self, weight: Tensor) -> PackedGroups:
        return PackedGroups(weight.detach().clone(memory_format=torch.contiguous_format), *weight.shape[1:])

    def pack_quantized_groups(self, weights: Sequence[QuantizedWeight]) -> PackedQuantized:
        return of_groups([keep_codes(weight) for weight in weights])

    def grouped_linear_packed(self, x: Tensor, weight: PackedGroups | PackedParts | PackedQuantized, bounds: Tensor) -> Tensor:
        with torch.no_grad():
            if isinstance(weight, PackedQuantized):
                if weight.is_integer_product:
                    return integer_groups(x, weight, bounds)
                return self.grouped_linear(round_inputs(x, weight, bounds), dequantize(weight).to(x.dtype), bounds)
            if isinstance(weight, PackedParts):
                return torch.cat([self.grouped_linear_packed(x, part, bounds) for part in weight.parts], dim=1)
            return self.grouped_linear(x, weight.data, bounds)
