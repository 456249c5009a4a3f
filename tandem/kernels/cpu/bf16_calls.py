"""Bindings of the C functions of linear layers in bf16: operands are rounded to bf16 and multiplied by the dot product of ``dot.h``, sums and results are
fp32. See ``calls`` for conventions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, bfloat16, empty, int64

from tandem.kernels.api import PackedGroups, PackedWeight
from tandem.kernels.cpu.calls import Calls, address, dense, indices, shape_error
from tandem.kernels.cpu.library import Library
from tandem.layout.panels import place_in_panels
from tandem.layout.shapes import Activation


class Bf16Calls(Calls):
    """The products of ``Calls`` in bf16. A packed weight is bf16, in panels of pairs of columns. ``rounds``: results, and gradients of ``x``, are rounded
    to bf16 numbers too."""

    def __init__(self, library: Library, rounds: bool) -> None:
        super().__init__(library)
        self._rounds = rounds
        self._bf16_linear: Callable[..., Any] = library.bf16_linear
        self._linear_grad_weight = library.bf16_linear_grad_weight

    def pack(self, weight: Tensor) -> PackedWeight:
        rows, columns = weight.shape
        data = empty(2 * self._c.bf16_packed_pairs(rows, columns), dtype=bfloat16)
        self._c.bf16_pack(weight.data_ptr(), rows, columns, data.data_ptr())
        return PackedWeight(data, rows, columns)

    def packed_rows(self, rows: Tensor, weight: PackedWeight) -> Tensor:
        rows = indices(rows, int64)
        if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < weight.rows):
            raise IndexError(f"packed_rows has a row outside 0 .. {weight.rows - 1}")
        return weight.data[self.places(rows.unsqueeze(-1), torch.arange(weight.columns), weight)].float()

    @staticmethod
    def places(rows: Tensor, columns: Tensor, weight: PackedWeight) -> Any:
        """Returns where the elements ``[rows, columns]`` are in ``weight.data``."""
        return 2 * place_in_panels(rows, columns // 2, (weight.rows, (weight.columns + 1) // 2)) + columns % 2

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._linear_of(x, weight, 0, weight.shape, bias)

    def linear_with(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        return self._linear_of(dense(x), weight.data, 1, weight[1:], bias)

    def _linear_of(self, x: Tensor, data: Tensor, packed: int, shape: tuple[int, ...], bias: Tensor | None) -> Tensor:
        columns, width = shape
        if x.dim() != 2 or x.shape[1] != width:
            raise shape_error("linear x", x, f"[T, {width}]")
        if bias is not None and bias.shape[0] != columns:
            raise shape_error("linear bias", bias, f"[{columns}]")
        out = x.new_empty(x.shape[0], columns)
        self._bf16_linear(x.data_ptr(), data.data_ptr(), packed, address(bias), self._rounds, x.shape[0], columns, width, out.data_ptr())
        return out

    def logits(self, hidden: Tensor, weight: Tensor | PackedWeight, out: Tensor) -> Tensor:
        is_packed = isinstance(weight, PackedWeight)
        data = weight.data if isinstance(weight, PackedWeight) else weight
        (rows, width), columns = hidden.shape, out.shape[1]
        self._bf16_linear(hidden.data_ptr(), data.data_ptr(), is_packed, 0, 0, rows, columns, width, out.data_ptr())
        return out

    def gated_mlp(
        self, x: Tensor, gate_up: PackedWeight, gate_up_bias: Tensor | None, down: PackedWeight, down_bias: Tensor | None, activation: Activation
    ) -> Tensor:
        out, sizes = self._gated_mlp_sizes(x, gate_up, down, activation)
        self._c.bf16_gated_mlp(
            x.data_ptr(), gate_up.data.data_ptr(), address(gate_up_bias), down.data.data_ptr(), address(down_bias), self._rounds, *sizes, out.data_ptr()
        )
        return out

    def pack_groups(self, weight: Tensor) -> PackedGroups:
        groups, rows, columns = weight.shape
        data = empty(groups, 2 * self._c.bf16_packed_pairs(rows, columns), dtype=bfloat16)
        for plain, packed in zip(weight, data, strict=True):
            self._c.bf16_pack(plain.data_ptr(), rows, columns, packed.data_ptr())
        return PackedGroups(data, rows, columns)

    def grouped_linear(self, x: Tensor, weight: Tensor | PackedGroups, bounds: Tensor) -> Tensor:
        is_packed, data, out, bounds, (groups, columns, width) = self._grouped_sizes(x, weight, bounds)
        stride = data.stride(0) // 2 if is_packed else data.stride(0)
        self._c.bf16_grouped_linear(
            x.data_ptr(), data.data_ptr(), is_packed, stride, bounds.data_ptr(), groups, self._rounds, columns, width, out.data_ptr()
        )
        return out

    def linear_grad_x(self, grad: Tensor, weight: Tensor, out: Tensor | None = None, adds: bool = False) -> Tensor:
        columns, width = weight.shape
        # What is added up in parts is rounded where it is whole.
        rounds = self._rounds and out is None
        out = grad.new_empty(len(grad), width) if out is None else out
        self._c.bf16_linear_grad_x(grad.data_ptr(), weight.data_ptr(), len(grad), columns, width, adds, rounds, out.data_ptr())
        return out
