"""The C++ kernels behind the interface of ``tandem.kernels.api``.

Checks are few, because a small model spends as long in Python as in arithmetic: dtype, device and the sizes that a wrong call would turn
into an invalid memory access. Autograd bookkeeping is set up only if a gradient is needed.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.api import (
    DeltaStates,
    KVLayer,
    LatentLayer,
    PackedGroups,
    PackedWeight,
    PagedBatch,
    Routing,
    SampledRows,
    TokenLogprobs,
)
from tandem.kernels.cpu import autograd, lm_head
from tandem.kernels.cpu.attention_calls import AttentionCalls
from tandem.kernels.cpu.bf16_calls import Bf16Calls
from tandem.kernels.cpu.calls import Calls, dense
from tandem.kernels.cpu.decode_step import CpuRowRecorder, is_recordable
from tandem.kernels.cpu.dense_program import BF16, BF16_ROUNDED, FP32, CpuDenseProgram, is_computable
from tandem.kernels.cpu.gated_delta import CpuPasses
from tandem.kernels.cpu.library import Library
from tandem.kernels.cpu.quantized import QuantizedCalls, side_by_side_weights
from tandem.kernels.cpu.trained_layers import train_layers
from tandem.kernels.decode_step import DrawnRows
from tandem.kernels.dense_layers import DenseLayer
from tandem.kernels.gated_delta import gated_delta_rule
from tandem.kernels.latent_cache import attend_wide
from tandem.kernels.quantized import PackedParts, PackedQuantized, QuantizedWeight, of_groups, with_parts
from tandem.kernels.reference_bf16 import flushed
from tandem.kernels.trained_layers import TrainLayers
from tandem.layout.panels import place_in_panels
from tandem.layout.shapes import Activation


class CpuKernels:
    """fp32 on CPU, with the same bits on every instruction set (see ``vec.h``)."""

    name = "cpu"
    multiplies_coded_groups = True

    def __init__(self, library: Library) -> None:
        self._library = library
        self._precision = FP32
        self._calls = Calls(library)
        self._attention = AttentionCalls(library)
        self._quantized = QuantizedCalls(library)
        self._delta = CpuPasses(library)

    def bf16_products(self, rounds: bool) -> "CpuBf16Products":
        """See ``ReferenceKernels.bf16_products``, whose bits the products have."""
        return CpuBf16Products(self._library, rounds)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if _wants_grad(x, weight, bias):
            return autograd.Linear.apply(x, weight, bias, self._calls)  # type: ignore[no-any-return]
        return self._calls.linear(dense(x), dense(weight), None if bias is None else dense(bias))

    def pack(self, weight: Tensor) -> PackedWeight:
        return self._calls.pack(dense(weight.detach()))

    def packed_rows(self, rows: Tensor, weight: PackedWeight) -> Tensor:
        return self._calls.packed_rows(rows, weight)

    def pack_part(self, weight: Tensor, panel: int, first: int, deep: int, to: int) -> None:
        """Writes columns ``first`` to ``first + deep`` (multiples of 16, but at the end) of the ``weight[N, K]``'s rows ``64 panel`` to ``64 panel + 63``,
        as ``pack`` lays them out one behind the other, to the address ``to``. On the calling thread alone."""
        self._calls.pack_part(weight, panel, first, deep, to)

    def write_panels(self, weight: Tensor, to: int | None) -> str:
        """Writes ``weight[N, K]``, N a multiple of 16, as ``pack`` lays it out to the address ``to`` (``None``: nowhere), past the cache. Returns the xxh3-128
        of what was written, which must be more than 240 bytes, in hexadecimal. On the calling thread alone."""
        return self._calls.write_panels(weight, to)

    def copy_and_digest(self, to: int, source: int, size_bytes: int) -> str:
        """Copies like ``memmove`` between addresses that do not overlap, past the cache: for a destination that is not read soon. Returns the xxh3-128 of
        the bytes, which must be more than 240, in hexadecimal."""
        return self._calls.copy_and_digest(to, source, size_bytes)

    def pack_elements(self, weight: PackedWeight, rows: Tensor, columns: Tensor, values: Tensor) -> bool:
        weight.data[place_in_panels(rows, columns, (weight.rows, weight.columns))] = values
        return True

    def pack_quantized(self, weight: QuantizedWeight) -> PackedQuantized:
        return self._quantized.pack(weight)

    def side_by_side(self, weights: Sequence[Any]) -> list[Any]:
        """Returns packed ``weights``, which every token reads one after the other, with quantized ones in one part of memory, in large pages: each alone may
        be too small for them."""
        return side_by_side_weights(weights)

    def unpack_quantized(self, weight: PackedQuantized) -> Tensor:
        return self._quantized.unpack(weight)

    def linear_packed(
        self, x: Tensor, weight: PackedWeight | PackedQuantized | PackedParts, bias: Tensor | None
    ) -> Tensor:
        if isinstance(weight, PackedWeight):
            return self._calls.linear_with(x, weight, bias)
        if isinstance(weight, PackedParts):
            return with_parts(self.linear_packed, x, weight, bias)
        return self._quantized.linear(dense(x), weight, bias)

    def gated_mlp_packed(
        self, x: Tensor, gate_up: PackedWeight, gate_up_bias: Tensor | None, down: PackedWeight, down_bias: Tensor | None, activation: Activation = "silu"
    ) -> Tensor:
        return self._calls.gated_mlp(dense(x), gate_up, gate_up_bias, down, down_bias, activation)

    def dense_program(self, layers: Sequence[DenseLayer], norm: Tensor) -> CpuDenseProgram | None:
        """See ``kernels.dense_layers``."""
        return CpuDenseProgram(self._library, layers, norm, self._precision) if is_computable(layers, norm) else None

    @property
    def train_layers(self) -> TrainLayers | None:
        """See ``kernels.trained_layers``."""
        return partial(train_layers, self._calls, self._attention) if self._precision == FP32 else None

    def row_recorder(self, rows: DrawnRows) -> CpuRowRecorder | None:
        """See ``kernels.decode_step``."""
        return CpuRowRecorder(self._library, rows) if is_recordable(rows) else None

    def grouped_linear(self, x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
        if _wants_grad(x, weight, None):
            return autograd.GroupedLinear.apply(x, weight, bounds, self._calls)  # type: ignore[no-any-return]
        return self._calls.grouped_linear(dense(x), dense(weight), bounds)

    def route(self, logits: Tensor, experts_per_token: int, normalised: bool) -> Routing:
        if logits.requires_grad and torch.is_grad_enabled():
            return Routing(*autograd.Route.apply(logits, experts_per_token, normalised, self._calls))
        return self._calls.route(dense(logits), experts_per_token, normalised)

    def pack_groups(self, weight: Tensor) -> PackedGroups:
        return self._calls.pack_groups(dense(weight.detach()))

    def pack_quantized_groups(self, weights: Sequence[QuantizedWeight]) -> PackedQuantized:
        return of_groups([self._quantized.pack(weight) for weight in weights])

    def grouped_linear_packed(self, x: Tensor, weight: PackedGroups | PackedParts | PackedQuantized, bounds: Tensor) -> Tensor:
        if isinstance(weight, PackedQuantized):
            return self._quantized.grouped_linear(dense(x), weight, bounds)
        if isinstance(weight, PackedParts):
            return torch.cat([self.grouped_linear_packed(x, part, bounds) for part in weight.parts], dim=1)
        return self._calls.grouped_linear(dense(x), weight, bounds)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, centred: bool = False) -> Tensor:
        if _wants_grad(x, weight, None):
            return autograd.RmsNorm.apply(x, weight, eps, centred, self._calls)  # type: ignore[no-any-return]
        return self._calls.rms_norm(dense(x), dense(weight), eps, centred, None)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, centred: bool = False) -> tuple[Tensor, Tensor]:
        if _wants_grad(x, weight, residual):
            return autograd.AddRmsNorm.apply(x, residual, weight, eps, centred, self._calls)  # type: ignore[no-any-return]
        return self._calls.add_rms_norm(dense(x), dense(residual), dense(weight), eps, centred, None)

    def rope(
        self, qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int],
        q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if _wants_grad(qkv, q_norm, k_norm):
            return autograd.Rope.apply(qkv, positions, cos_sin, heads, q_norm, k_norm, eps, self._attention)  # type: ignore[no-any-return]
        return self._attention.rope(dense(qkv), positions, cos_sin, heads, q_norm, k_norm, eps)

    def rope_to_cache(
        self, qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int],
        q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cache: KVLayer, slots: Tensor,
    ) -> Tensor:
        return self._attention.rope_to_cache(dense(qkv), positions, cos_sin, heads, q_norm, k_norm, eps, cache, slots)

    def round_kv(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return autograd.RoundKV.apply(x, dtype, self._attention)  # type: ignore[no-any-return]
        return self._attention.round_kv(dense(x), dtype)

    def packed_attention(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int | None,
        query_start: Tensor | None = None, cap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:
        if v.shape[2] != k.shape[2]:
            return attend_wide(self.packed_attention, q, k, v, cu_seqlens, max_seqlen, scale, window, query_start, cap, sinks)
        if _wants_grad(q, k, v) or (sinks is not None and _wants_grad(sinks, None, None)):
            return autograd.PackedAttention.apply(q, k, v, cu_seqlens, scale, window, self._attention, query_start, cap, sinks)  # type: ignore[no-any-return]
        return self._attention.packed_attention(dense(q), dense(k), dense(v), cu_seqlens, scale, window, None, query_start, cap, sinks)

    def paged_attention(
        self, q: Tensor, cache: KVLayer, batch: PagedBatch, scale: float, window: int | None, cap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        return self._attention.paged_attention(dense(q), cache, batch, scale, window, cap, sinks)

    def latent_attention(self, q: Tensor, cache: LatentLayer, batch: PagedBatch, scale: float, value_size: int) -> Tensor:
        return self._attention.latent_attention(dense(q), cache, batch, scale)[..., :value_size]

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor, states: DeltaStates | None = None
    ) -> Tensor:
        return gated_delta_rule(self._delta, q, k, v, decay, beta, bounds, states)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate_mul(gate_up, "silu")

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate_mul(gate_up, "gelu_pytorch_tanh")

    def clamped_swiglu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate_mul(gate_up, "clamped_swiglu")

    def _gate_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        if gate_up.requires_grad and torch.is_grad_enabled():
            return autograd.GateMul.apply(gate_up, activation, self._calls)  # type: ignore[no-any-return]
        return self._calls.gate_mul(dense(gate_up), activation)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return autograd.SoftCap.apply(x, cap, self._calls)  # type: ignore[no-any-return]
        return self._calls.soft_cap(dense(x), cap)

    def token_logprobs(self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, cap: float | None = None) -> TokenLogprobs:
        if not temperature > 0:
            raise ValueError(f"token_logprobs temperature is {temperature}; it must be above 0")
        return lm_head.token_logprobs(hidden, weight, targets, temperature, self._calls, cap)

    def logits_logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        logits = dense(logits)
        raw = torch.empty(logits.shape[0])
        self._calls.logprobs(logits, targets, 1.0, raw, None, None)
        return raw

    def sample_rows(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> SampledRows:
        return self._calls.sample_rows(dense(logits), temperature, top_k, top_p, min_p, uniform)


class CpuBf16Products(CpuKernels):
    """See ``CpuKernels.bf16_products``."""

    def __init__(self, library: Library, rounds: bool) -> None:
        super().__init__(library)
        self._precision = BF16_ROUNDED if rounds else BF16
        self._calls: Bf16Calls = Bf16Calls(library, rounds)

    @property
    def has_instruction(self) -> bool:
        """Whether the processor multiplies pairs of bf16 numbers itself."""
        return bool(self._library.bf16_has_instruction())

    def pack_elements(self, weight: PackedWeight, rows: Tensor, columns: Tensor, values: Tensor) -> bool:
        weight.data[self._calls.places(rows, columns, weight)] = flushed(values).to(weight.data.dtype)
        return True


def _wants_grad(first: Tensor, second: Tensor | None, third: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (
        first.requires_grad
        or (second is not None and second.requires_grad)
        or (third is not None and third.requires_grad)
    )
