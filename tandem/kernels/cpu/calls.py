"""Bindings of the C functions: tensors in, tensors out, with outputs allocated and error codes converted to exceptions.

Floating tensors are dense fp32 on CPU (see ``dense``); index tensors are converted to their dtype here. Outputs come from ``new_empty``
with plain sizes, by far the fastest way to allocate a small tensor.
"""

from ctypes import c_char

from torch import Tensor, empty, empty_like, float32, float64, int64

from tandem.kernels.api import PackedGroups, PackedWeight, Routing, SampledRows
from tandem.kernels.cpu.library import Library
from tandem.kernels.cpu.repeated_rows import RepeatedRows, addresses_of
from tandem.layout.shapes import Activation

ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_pytorch_tanh": 1, "clamped_swiglu": 2}
"""The codes of rows.h."""


def dense(x: Tensor) -> Tensor:
    """Returns ``x`` in contiguous memory. Raises ``TypeError`` for an unsupported dtype or device."""
    if x.dtype is not float32 or not x.is_cpu:
        raise TypeError(f"kernels cpu take fp32 on cpu, not {x.dtype} on {x.device}; use kernels reference")
    return x if x.is_contiguous() else x.contiguous()


def shape_error(name: str, x: Tensor, wanted: str) -> ValueError:
    """Returns an error to be raised under an ``if``: formatting a message in every call would cost as much as a small kernel."""
    return ValueError(f"{name} has shape {list(x.shape)}; expected {wanted}")


def norm_groups(weight: Tensor, rows: int, width: int) -> int:
    """Returns the G of a norm's ``weight[G, H]``, 1 for [H]. Raises ``ValueError`` for one that does not fit ``rows`` of ``width``."""
    groups = 1 if weight.ndim == 1 else weight.shape[0]
    if weight.shape[-1] != width or rows % groups:
        raise shape_error("norm weight", weight, f"[{width}], or [G, {width}] with G a divisor of {rows} rows")
    return groups


def indices(x: Tensor, dtype: object) -> Tensor:
    """Returns ``x`` in contiguous memory of ``dtype``."""
    if x.dtype is not dtype:
        x = x.to(dtype)  # type: ignore[call-overload]
    return x if x.is_contiguous() else x.contiguous()


def address(x: Tensor | None) -> int:
    """Returns the address of ``x``, 0 for none."""
    return 0 if x is None else dense(x).data_ptr()


class Calls:
    """One method per C function, except those of attention and the KV cache (``AttentionCalls``)."""

    def __init__(self, library: Library) -> None:
        self._c = library
        self._linear = library.linear
        self._linear_grad_weight = library.linear_grad_weight

    def pack(self, weight: Tensor) -> PackedWeight:
        rows, columns = weight.shape
        data = empty(self._c.packed_floats(rows, columns), dtype=float32)
        self._c.pack(weight.data_ptr(), rows, columns, data.data_ptr())
        return PackedWeight(data, rows, columns)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows, (columns, width) = x.shape[0], weight.shape
        if x.dim() != 2 or x.shape[1] != width:
            raise shape_error("linear x", x, f"[T, {width}]")
        if bias is not None and bias.shape[0] != columns:
            raise shape_error("linear bias", bias, f"[{columns}]")
        out = x.new_empty(rows, columns)
        self._c.linear(x.data_ptr(), weight.data_ptr(), 0, address(bias), rows, columns, width, out.data_ptr())
        return out

    def packed_rows(self, rows: Tensor, weight: PackedWeight) -> Tensor:
        data, count, width = weight
        rows = indices(rows, int64)
        out = data.new_empty(*rows.shape, width)
        if self._c.packed_rows(data.data_ptr(), count, width, rows.data_ptr(), rows.numel(), out.data_ptr()):
            raise IndexError(f"packed_rows has a row outside 0 .. {count - 1}")
        return out

    def pack_part(self, weight: Tensor, panel: int, first: int, deep: int, to: int) -> None:
        rows, columns = weight.shape
        self._c.pack_part(weight.data_ptr(), rows, columns, panel, first, deep, to)

    def write_panels(self, weight: Tensor, to: int | None) -> str:
        digest = bytearray(16)
        self._c.write_panels(weight.data_ptr(), *weight.shape, to, (c_char * 16).from_buffer(digest))
        return digest.hex()

    def copy_and_digest(self, to: int, source: int, size_bytes: int) -> str:
        digest = bytearray(16)
        self._c.copy_and_digest(to, source, size_bytes, (c_char * 16).from_buffer(digest))
        return digest.hex()

    def linear_with(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        # The check of ``dense``, inlined: for one token the call costs as much as the arithmetic.
        if x.dtype is not float32 or not x.is_cpu or not x.is_contiguous():
            x = dense(x)
        data, columns, width = weight
        rows, x_width = x.shape
        if x_width != width:
            raise shape_error("linear x", x, f"[T, {width}]")
        out = x.new_empty(rows, columns)
        at_bias = 0 if bias is None else dense(bias).data_ptr()
        self._linear(x.data_ptr(), data.data_ptr(), 1, at_bias, rows, columns, width, out.data_ptr())
        return out

    def pack_groups(self, weight: Tensor) -> PackedGroups:
        groups, rows, columns = weight.shape
        data = empty(groups, self._c.packed_floats(rows, columns), dtype=float32)
        for plain, packed in zip(weight, data, strict=True):
            self._c.pack(plain.data_ptr(), rows, columns, packed.data_ptr())
        return PackedGroups(data, rows, columns)

    def grouped_linear(self, x: Tensor, weight: Tensor | PackedGroups, bounds: Tensor) -> Tensor:
        is_packed, data, out, bounds, (groups, columns, width) = self._grouped_sizes(x, weight, bounds)
        self._c.grouped_linear(
            x.data_ptr(), data.data_ptr(), is_packed, data.stride(0), bounds.data_ptr(), groups, columns, width,
            out.data_ptr(),
        )  # fmt: skip
        return out

    @staticmethod
    def _grouped_sizes(x: Tensor, weight: Tensor | PackedGroups, bounds: Tensor) -> tuple[bool, Tensor, Tensor, Tensor, tuple[int, int, int]]:
        """Returns whether the weights of ``grouped_linear`` are packed, those, its output, dense bounds and (G, N, K), which it checks."""
        is_packed = isinstance(weight, PackedGroups)
        data, columns, width = weight if isinstance(weight, PackedGroups) else (weight, *weight.shape[1:])
        groups, bounds = data.shape[0], indices(bounds, int64)
        if x.dim() != 2 or x.shape[1] != width:
            raise shape_error("grouped_linear x", x, f"[R, {width}]")
        if bounds.shape[0] != groups + 1:
            raise shape_error("grouped_linear bounds", bounds, f"[{groups + 1}]")
        if int(bounds[-1]) != x.shape[0]:
            raise ValueError(f"grouped_linear bounds end at {int(bounds[-1])}; x has {x.shape[0]} rows")
        return is_packed, data, x.new_empty(x.shape[0], columns), bounds, (groups, columns, width)

    def route(self, logits: Tensor, each: int, normalised: bool) -> Routing:
        rows, experts = logits.shape
        if not 1 <= each <= experts:
            raise ValueError(f"route: {each} experts for a token of {experts}")
        gates, chosen = logits.new_empty(rows, each), empty(rows, each, dtype=int64)
        bounds, places = empty(experts + 1, dtype=int64), empty(2, rows * each, dtype=int64)
        order, inverse = places
        self._c.route(
            logits.data_ptr(), rows, experts, each, normalised, gates.data_ptr(), chosen.data_ptr(), bounds.data_ptr(),
            order.data_ptr(), inverse.data_ptr(),
        )  # fmt: skip
        return Routing(gates, chosen, bounds, order, inverse)

    def gated_mlp(
        self, x: Tensor, gate_up: PackedWeight, gate_up_bias: Tensor | None, down: PackedWeight, down_bias: Tensor | None, activation: Activation
    ) -> Tensor:
        out, sizes = self._gated_mlp_sizes(x, gate_up, down, activation)
        self._c.gated_mlp(
            x.data_ptr(), gate_up.data.data_ptr(), address(gate_up_bias), down.data.data_ptr(), address(down_bias), *sizes, out.data_ptr()
        )
        return out

    @staticmethod
    def _gated_mlp_sizes(x: Tensor, gate_up: PackedWeight, down: PackedWeight, activation: Activation) -> tuple[Tensor, tuple[int, int, int, int]]:
        """Returns the output of ``gated_mlp``, and T, H, F and the code of the activation, which it checks."""
        (rows, hidden), inner = x.shape, down.columns
        if (gate_up.rows, gate_up.columns) != (2 * inner, hidden):
            raise ValueError(f"gated_mlp gate_up has shape {[*gate_up[1:]]}; expected [{2 * inner}, {hidden}]")
        if down.rows != hidden:
            raise ValueError(f"gated_mlp down has shape {[*down[1:]]}; expected [{hidden}, {inner}]")
        return x.new_empty(rows, hidden), (rows, hidden, inner, ACTIVATIONS[activation])

    def linear_grad_x(self, grad: Tensor, weight: Tensor, out: Tensor | None = None, adds: bool = False) -> Tensor:
        """Computes ``grad[T, N] @ weight[N, K]``, written to ``out`` or added to it."""
        columns, width = weight.shape
        out = grad.new_empty(len(grad), width) if out is None else out
        self._c.linear_grad_x(grad.data_ptr(), weight.data_ptr(), len(grad), columns, width, adds, out.data_ptr())
        return out

    def linear_grad_weight(self, grad: Tensor, x: Tensor, out: Tensor | None = None, adds: bool = False) -> Tensor:
        """Computes ``grad[T, N].T @ x[T, K]``, written to ``out`` or added to it."""
        rows, columns, width = len(x), grad.shape[1], x.shape[1]
        out = grad.new_empty(columns, width) if out is None else out
        self._linear_grad_weight(grad.data_ptr(), x.data_ptr(), rows, columns, width, adds, out.data_ptr())
        return out

    def repeated_grad_weight(self, grad: Tensor, x: Tensor, rows: RepeatedRows) -> Tensor:
        """Computes ``linear_grad_weight`` of all ``rows``, whose gradients are rows of ``grad`` and whose inputs are rows of ``x``."""
        columns, width = grad.shape[1], x.shape[1]
        out = grad.new_empty(columns, width)
        saved, of_grad, _ = rows.addresses
        self._c.repeated_grad_weight(grad.data_ptr(), of_grad, x.data_ptr(), saved, rows.count, columns, width, out.data_ptr())
        return out

    def linear_grad_bias(self, grad: Tensor) -> Tensor:
        out = grad.new_empty(grad.shape[1])
        self._c.linear_grad_bias(grad.data_ptr(), grad.shape[0], grad.shape[1], out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, centred: bool, rstd: Tensor | None) -> Tensor:
        rows, width = x.shape
        groups = norm_groups(weight, rows, width)
        out = x.new_empty(rows, width)
        self._c.rms_norm(x.data_ptr(), 0, weight.data_ptr(), rows, width, groups, eps, centred, out.data_ptr(), 0, address(rstd))
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, centred: bool, rstd: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        rows, width = x.shape
        groups = norm_groups(weight, rows, width)
        if residual.shape != x.shape:
            raise shape_error("norm residual", residual, f"{list(x.shape)}")
        out, total = x.new_empty(rows, width), x.new_empty(rows, width)
        self._c.rms_norm(
            x.data_ptr(), residual.data_ptr(), weight.data_ptr(), rows, width, groups, eps, centred, out.data_ptr(), total.data_ptr(),
            address(rstd),
        )  # fmt: skip
        return out, total

    def rms_norm_backward(
        self, x: Tensor, weight: Tensor, grad: Tensor, grad_total: Tensor | None, centred: bool, rstd: Tensor, same: RepeatedRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Computes the gradients by x, like ``grad``, and by ``weight``. ``same``: the rows, of which ``x`` and ``grad`` have each once."""
        width, (count, rows) = x.shape[1], addresses_of(same, len(grad))
        grad_x, grad_weight = grad.new_empty(grad.shape), x.new_empty(weight.shape)
        self._c.rms_norm_backward(
            x.data_ptr(), weight.data_ptr(), grad.data_ptr(), address(grad_total), rstd.data_ptr(), *rows, count, width, weight.numel() // width, centred,
            grad_x.data_ptr(), grad_weight.data_ptr(),
        )  # fmt: skip
        return grad_x, grad_weight

    def gate_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        rows, width = gate_up.shape
        if width % 2:
            raise shape_error("gate_mul gate_up", gate_up, "[T, 2 F]")
        out = gate_up.new_empty(rows, width // 2)
        self._c.gate_mul(gate_up.data_ptr(), rows, width // 2, ACTIVATIONS[activation], out.data_ptr())
        return out

    def gate_mul_backward(self, gate_up: Tensor, grad: Tensor, activation: Activation, saved: Tensor | None = None) -> Tensor:
        """``saved[len(grad)]`` int64: the row of ``gate_up`` that each of ``grad`` belongs to (``None``: the same)."""
        out, at_saved = grad.new_empty(len(grad), gate_up.shape[1]), 0 if saved is None else saved.data_ptr()
        self._c.gate_mul_backward(gate_up.data_ptr(), at_saved, grad.data_ptr(), len(grad), grad.shape[1], ACTIVATIONS[activation], out.data_ptr())
        return out

    def soft_cap(self, x: Tensor, cap: float, out: Tensor | None = None) -> Tensor:
        """Writes ``Kernels.soft_cap`` of a dense ``x[T, N]`` to ``out``, which may be ``x``."""
        out = empty_like(x) if out is None else out
        self._c.soft_cap(x.data_ptr(), *x.shape, cap, out.data_ptr())
        return out

    def soft_cap_backward(self, capped: Tensor, grad: Tensor, cap: float) -> Tensor:
        out = empty_like(grad)
        self._c.soft_cap_backward(capped.data_ptr(), grad.data_ptr(), *grad.shape, cap, out.data_ptr())
        return out

    def logits(self, hidden: Tensor, weight: Tensor | PackedWeight, out: Tensor) -> Tensor:
        """Computes ``linear`` or ``linear_with`` of dense tensors, written to ``out[T, V]``."""
        is_packed = isinstance(weight, PackedWeight)
        data = weight.data if isinstance(weight, PackedWeight) else weight
        (rows, width), columns = hidden.shape, out.shape[1]
        self._c.linear(hidden.data_ptr(), data.data_ptr(), is_packed, 0, rows, columns, width, out.data_ptr())
        return out

    def logprobs(
        self, logits: Tensor, targets: Tensor, temperature: float, raw: Tensor, scaled: Tensor | None,
        entropy: Tensor | None, softmaxes: Tensor | None = None,
    ) -> None:
        """Fills ``raw[T]``, ``scaled[T]`` and ``entropy[T]`` (see ``TokenLogprobs``). ``softmaxes`` [T, 2], or [T, 4] with ``scaled``, receives
        what ``logprobs_backward`` needs. Raises ``IndexError`` for a target outside the vocabulary."""
        rows, width = logits.shape
        if targets.shape[0] != rows:
            raise shape_error("targets", targets, f"[{rows}]")
        code = self._c.logprobs(
            logits.data_ptr(), indices(targets, int64).data_ptr(), rows, width, 1 / temperature, raw.data_ptr(),
            address(scaled), address(entropy), address(softmaxes),
        )  # fmt: skip
        if code:
            raise IndexError(f"logprobs: a target is outside the vocabulary of {width}")

    def logprobs_backward(
        self, logits: Tensor, targets: Tensor, first: int, temperature: float, softmaxes: Tensor, grad_raw: Tensor,
        grad_scaled: Tensor | None, out: Tensor, cap: float | None = None,
    ) -> None:
        """Writes the gradient by ``logits`` [T, N] of the token ids from ``first`` on to the dense ``out[T, N]``, which may be
        ``logits``. ``cap``: they are capped, and the gradient is that by what was capped."""
        rows, width = logits.shape
        self._c.logprobs_backward(
            logits.data_ptr(), logits.stride(0), targets.data_ptr(), rows, first, width, 1 / temperature, cap or 0.0, softmaxes.data_ptr(),
            softmaxes.shape[1], grad_raw.data_ptr(), address(grad_scaled), out.data_ptr(),
        )  # fmt: skip

    def sample_rows(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> SampledRows:
        rows, width = logits.shape
        if width == 0:
            raise shape_error("logits", logits, "[R, V] with V above 0")
        columns = [
            indices(column, dtype)
            for column, dtype in (
                (temperature, float32), (top_k, int64), (top_p, float32), (min_p, float32), (uniform, float64),
            )
        ]  # fmt: skip
        for column in columns:
            if column.shape[0] != rows:
                raise shape_error("a sampling setting", column, f"[{rows}]")
        tokens = empty(rows, dtype=int64)
        raw, sampling = logits.new_empty(rows), logits.new_empty(rows)
        self._c.sample(
            logits.data_ptr(), rows, width, *(column.data_ptr() for column in columns), tokens.data_ptr(),
            raw.data_ptr(), sampling.data_ptr(),
        )  # fmt: skip
        return SampledRows(tokens, raw, sampling)
