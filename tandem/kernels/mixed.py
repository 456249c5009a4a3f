"""Mixed precision: linear layers multiply in bf16, fp16 or fp8, while weights, residual stream, norms, attention's softmax and all
gradients of weights stay in fp32.

A product of 16-bit operands with an fp32 sum is what a tensor core computes. If the device has such units, the operands are cast and torch
multiplies them; otherwise (``emulated``) tensors stay fp32, and operands and results are rounded to 16-bit values. For bf16 the wrapped kernels then
multiply by the law of ``reference_bf16``, that of the dot-product instruction of CPUs, in the same bits with and without it; for the other formats the
product is an fp32 one, which gives the results of a 16-bit unit, up to the order of summation, at fp32's speed and memory. GPUs of compute capability
8.9 and above have fp8 units (``fp8``).
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tandem.kernels.api import Kernels, PackedGroups, PackedWeight, TokenLogprobs, gate_of
from tandem.kernels.dense_layers import DenseLayer, DenseProgram, dense_program
from tandem.kernels.fp8 import FP8_CAPABILITY, Fp8Linear, fits_fp8_units, power_of_two_scale
from tandem.kernels.quantized import PackedParts, PackedQuantized, with_parts
from tandem.layout.shapes import Activation

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
COMPUTE_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""The precision of activations and gradients between linear layers; fp8 applies to the operands only."""


def in_precision(kernels: Kernels, precision: Precision, device: torch.device) -> Kernels:
    """Returns ``kernels`` under ``precision``; ``fp32`` leaves them unchanged. Except for ``fp8``, a decoder that infers with them has the bits of
    one that trains, if ``kernels`` keep the invariance law of ``api``."""
    if precision == "fp32":
        return kernels
    mixed: Any = MixedKernels(kernels, precision, is_emulated(precision, device))
    return mixed  # type: ignore[no-any-return]


def is_emulated(precision: Precision, device: torch.device) -> bool:
    """Returns whether ``device`` has no units for ``precision``, or this module does not use them."""
    if precision == "fp32":
        return False
    if device.type != "cuda":
        return True
    return precision == "fp8" and not (torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY)


def dot_products(kernels: Kernels) -> bool:
    """Returns whether ``kernels``, not mixed ones, multiply in bf16 by an instruction of the processor."""
    products = getattr(kernels, "bf16_products", None)
    return products is not None and bool(products(True).has_instruction)


def emulation_note(precision: Precision, device: torch.device, kernels: Kernels, where: str) -> str:
    """Returns a line on the speed of the products under ``precision`` if ``device`` has no units for it that ``kernels`` use; else it is empty."""
    if not is_emulated(precision, device) or (precision == "bf16" and dot_products(kernels)):
        return ""
    if precision == "bf16":
        return (
            f"precision bf16 is emulated {where}: kernels {kernels.name} here have no instruction for dot products of bf16 (avx512_bf16); the numbers are "
            "those of a processor that has it, and take longer than in fp32"
        )
    return f"precision {precision} is emulated {where}: operands are rounded to it and multiplied in fp32, which shows its numbers and not its speed"


def whole_precision(kernels: Kernels) -> Kernels:
    """Returns the kernels wrapped by mixed ones, for operations that must not be rounded, such as a router."""
    # Looked up by name, because other kernels may wrap the mixed ones.
    inner: Kernels = getattr(kernels, "inner", kernels)
    return inner


def has_independent_rows(kernels: Kernels) -> bool:
    """Returns whether products of a row do not depend on the rows beside it: in fp8 the scale of the inputs is that of all rows, and kernels that are not
    deterministic choose the order of their sums by the number of rows."""
    return getattr(kernels, "precision", None) != "fp8" and bool(getattr(kernels, "deterministic", True))


def activation_dtype(kernels: Kernels, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of activations between the linear layers of a model with weights of ``dtype``."""
    return kernels.dtype if isinstance(kernels, MixedKernels) and kernels.is_native else dtype


def head_kernels(kernels: Kernels) -> Kernels:
    """Returns the kernels for the output head: mixed ones round its operands, but not the logits."""
    head: Kernels = getattr(kernels, "head", kernels)
    return head


class MixedKernels:
    """Kernels whose ``linear``, ``grouped_linear`` and ``token_logprobs`` round their operands, as do the packed products, which for ``fp8``
    are always emulated; everything else is ``inner``'s. ``rounds_results``: emulated products are rounded too. ``is_native``: ``inner``
    multiplies in the compute dtype.

    ``bf16``, ``fp16``: x, weight, result and the gradients of x and of the result are rounded to nearest; the gradient of a weight is the
    product in fp32 (on 16-bit units of a GPU rounded too, as under ``torch.autocast``). ``fp8`` (Micikevicius et al., 2022): x and weight in e4m3, the
    result's gradient in e5m2, each with one scale per tensor that brings its largest magnitude to the format's largest number; results in
    bf16; the head stays in bf16."""

    multiplies_coded_groups = False

    def __init__(self, inner: Kernels, precision: Precision, emulated: bool, rounds_results: bool = True) -> None:
        self.inner, self.precision, self.emulated, self.rounds_results = inner, precision, emulated, rounds_results
        self.name = inner.name
        self.dtype = COMPUTE_DTYPE[precision]
        self.is_native = not emulated and precision != "fp8"
        make = getattr(inner, "bf16_products", None) if emulated and precision == "bf16" else None
        self._bf16_kernels: Kernels | None = None if make is None else make(rounds_results)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Does ``inner.linear`` with rounded operands. Emulated: fp32 with 16-bit values; else in the compute dtype."""
        if self._bf16_kernels is not None:
            return self._bf16_kernels.linear(x, weight, bias)
        if not self.emulated and self.precision == "fp8":
            if fits_fp8_units(weight):
                return Fp8Linear.apply(x, weight, bias)  # type: ignore[no-any-return]
            # bf16 represents every fp8 value.
            x, weight = self._input(x), self._weight(weight)
        if not self.emulated:
            return self.inner.linear(x.to(self.dtype), weight.to(self.dtype), None if bias is None else bias.to(self.dtype))
        out = self.inner.linear(self._input(x), self._weight(weight), bias)
        return self._output(out)

    def grouped_linear(self, x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
        """Does ``inner.grouped_linear`` with rounded operands."""
        if self._bf16_kernels is not None:
            return self._bf16_kernels.grouped_linear(x, weight, bounds)
        if not self.emulated:
            return self.inner.grouped_linear(x.to(self.dtype), weight.to(self.dtype), bounds)
        return self._output(self.inner.grouped_linear(self._input(x), self._weight(weight), bounds))

    def token_logprobs(self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, cap: float | None = None) -> TokenLogprobs:
        """Does ``inner.token_logprobs`` with 16-bit operands; logits and later values are fp32 if emulated."""
        if self._bf16_kernels is not None:
            return self._bf16_kernels.token_logprobs(_Round.apply(hidden, None, self.dtype), weight, targets, temperature, cap)
        if not self.emulated:
            return self.inner.token_logprobs(hidden.to(self.dtype), weight.to(self.dtype), targets, temperature, cap)
        hidden, weight = _Round.apply(hidden, self.dtype, self.dtype), _Round.apply(weight, self.dtype, None)
        return self.inner.token_logprobs(hidden, weight, targets, temperature, cap)

    @property
    def head(self) -> "MixedKernels":
        """The kernels for the output head, which stays in bf16 under ``fp8``."""
        return MixedKernels(self.inner, "bf16" if self.precision == "fp8" else self.precision, self.emulated, rounds_results=False)

    def pack(self, weight: Tensor) -> PackedWeight:
        """Does ``inner.pack`` with the rounded weight."""
        if self._bf16_kernels is not None:
            return self._bf16_kernels.pack(weight)
        return self.inner.pack(self._packed(weight))

    def pack_elements(self, weight: PackedWeight, rows: Tensor, columns: Tensor, values: Tensor) -> bool:
        """Does ``inner.pack_elements`` with the rounded values; not in fp8, whose scale is the whole weight's."""
        if self._bf16_kernels is not None:
            return self._bf16_kernels.pack_elements(weight, rows, columns, values)
        return self.precision != "fp8" and self.inner.pack_elements(weight, rows, columns, self._packed(values))

    def linear_packed(self, x: Tensor, weight: PackedWeight | PackedQuantized | PackedParts, bias: Tensor | None) -> Tensor:
        """Does ``linear`` with its bits. No gradient."""
        if self._bf16_kernels is not None and not isinstance(weight, PackedQuantized):
            if isinstance(weight, PackedWeight) or not any(isinstance(part, PackedQuantized) for part in weight.parts):
                return self._bf16_kernels.linear_packed(x, weight, bias)
            return self._output(with_parts(self.linear_packed, x, weight, bias))
        with torch.no_grad():
            if self.is_native:
                return self.inner.linear_packed(x.to(self.dtype), weight, None if bias is None else bias.to(self.dtype))
            return self._output(self.inner.linear_packed(self._input(x), weight, bias))

    def gated_mlp_packed(
        self, x: Tensor, gate_up: PackedWeight, gate_up_bias: Tensor | None, down: PackedWeight, down_bias: Tensor | None, activation: Activation = "silu"
    ) -> Tensor:
        """Computes its three steps; if the wrapped kernels do not round results themselves, one by one."""
        if self._bf16_kernels is not None:
            return self._bf16_kernels.gated_mlp_packed(x, gate_up, gate_up_bias, down, down_bias, activation)
        with torch.no_grad():
            return self.linear_packed(gate_of(self.inner, activation)(self.linear_packed(x, gate_up, gate_up_bias)), down, down_bias)

    def dense_program(self, layers: Sequence[DenseLayer], norm: Tensor) -> DenseProgram | None:
        """See ``kernels.dense_layers``; of the wrapped kernels' own products in bf16."""
        return None if self._bf16_kernels is None else dense_program(self._bf16_kernels, layers, norm)

    def pack_groups(self, weight: Tensor) -> PackedGroups:
        """Does ``inner.pack_groups`` with the rounded weights."""
        if self._bf16_kernels is not None:
            return self._bf16_kernels.pack_groups(weight)
        return self.inner.pack_groups(self._packed(weight))

    def grouped_linear_packed(self, x: Tensor, weight: PackedGroups, bounds: Tensor) -> Tensor:
        """Does ``grouped_linear`` with its bits. No gradient."""
        if self._bf16_kernels is not None and not _is_quantized(weight):
            return self._bf16_kernels.grouped_linear_packed(x, weight, bounds)
        with torch.no_grad():
            if self.is_native:
                return self.inner.grouped_linear_packed(x.to(self.dtype), weight, bounds)
            return self._output(self.inner.grouped_linear_packed(self._input(x), weight, bounds))

    def _packed(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.dtype) if self.is_native else self._weight(weight.detach())

    def _input(self, x: Tensor) -> Tensor:
        if self.precision == "fp8":
            return _Scaled.apply(x, torch.float8_e4m3fn, None)  # type: ignore[no-any-return]
        return _Round.apply(x, self.dtype, self.dtype)  # type: ignore[no-any-return]

    def _weight(self, weight: Tensor) -> Tensor:
        if self.precision == "fp8":
            return _Scaled.apply(weight, torch.float8_e4m3fn, None)  # type: ignore[no-any-return]
        return _Round.apply(weight, self.dtype, None)  # type: ignore[no-any-return]

    def _output(self, out: Tensor) -> Tensor:
        if not self.rounds_results:
            return out
        rounded: Tensor = _Round.apply(out, self.dtype, self.dtype)
        return _Scaled.apply(rounded, None, torch.float8_e5m2) if self.precision == "fp8" else rounded  # type: ignore[no-any-return]


def _is_quantized(weight: Any) -> bool:
    """Returns whether the packed ``weight`` of groups is quantized, as all of its parts are then."""
    return isinstance(weight.parts[0] if isinstance(weight, PackedParts) else weight, PackedQuantized)


class _Round(torch.autograd.Function):
    """Rounds x to ``forward`` and its gradient to ``backward`` (``None``: unchanged)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: torch.dtype | None, backward: torch.dtype | None) -> Tensor:
        ctx.backward_dtype = backward
        return x.view_as(x) if forward is None else x.to(forward).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (grad if ctx.backward_dtype is None else grad.to(ctx.backward_dtype).to(grad.dtype)), None, None


class _Scaled(torch.autograd.Function):
    """Does ``_Round`` in fp8 with one scale per tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: torch.dtype | None, backward: torch.dtype | None) -> Tensor:
        ctx.backward_dtype = backward
        return x.view_as(x) if forward is None else round_fp8(x, forward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (grad if ctx.backward_dtype is None else round_fp8(grad, ctx.backward_dtype)), None, None


def round_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds ``x`` to the nearest values of ``dtype`` under one power-of-two scale, which is exact. A non-finite tensor becomes NaN, so
    that an overflow is visible."""
    largest, scale = power_of_two_scale(x, dtype)
    return torch.where(largest.isfinite(), (x * scale).to(dtype).to(x.dtype) / scale, torch.full_like(x, torch.nan))
