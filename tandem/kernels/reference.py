"""The kernels in plain torch: any dtype, any device, differentiable, and under the invariance law of ``api`` without a compiler.

A matrix product of torch gives a row different bits when the number of rows changes, because the library selects its inner kernel by shape.
Here every product has a shape that does not depend on the batch: linear layers multiply tiles of ``TILE_ROWS`` rows, and attention
multiplies tiles of ``TILE_ROWS`` absolute positions in which a query has its own fixed row. Inputs are copied to aligned memory first,
because the library may also depend on alignment.

float64 serves as the ground truth for values and gradients; it does not use tiles unless requested.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.api import (
    BLOCK_TOKENS,
    DeltaStates,
    KVLayer,
    LatentLayer,
    PagedBatch,
    Routing,
    SampledRows,
    TokenLogprobs,
    sum_in_order,
)
from tandem.kernels.gated_delta import ReferencePasses, gated_delta_rule
from tandem.kernels.kv_dtype import RoundKV, encode
from tandem.kernels.latent_cache import read_rows
from tandem.kernels.plain_packing import PlainPacking
from tandem.kernels.reference_attention import attend, gather
from tandem.kernels.reference_bf16 import Bf16Linear, whole_logprobs
from tandem.kernels.reference_dtype import TILE_ROWS, compute_dtype, soft_cap
from tandem.kernels.reference_logprobs import TokenLogprobsFunction, filter_logits, first_argmax, gather_columns, log_softmax
from tandem.kernels.softmax import softmax
from tandem.layout.shapes import SWIGLU_ALPHA, SWIGLU_LIMIT

GELU_SLOPE = math.sqrt(2 / math.pi)
MOST_EXPONENT = 80.0
FEWEST_COLUMNS = 16
"""Narrower products (observed with 2 to 11 columns) give a row different bits depending on its position in the tile; they are padded."""


class ReferenceKernels(PlainPacking):
    """``tiled``: guarantees the invariance law bit for bit (slower); ``None``: for every dtype but float64."""

    name = "reference"

    def __init__(self, tiled: bool | None = None) -> None:
        self._tiled = tiled

    def bf16_products(self, rounds: bool) -> "ReferenceBf16Products":
        """Returns the same kernels with the products of linear layers in bf16, by the law of ``reference_bf16``. ``rounds``: results, after their bias, and
        gradients of ``x`` are rounded to bf16 numbers too; the logits of ``token_logprobs`` are not."""
        return ReferenceBf16Products(rounds)

    def _is_tiled(self, x: Tensor) -> bool:
        return x.dtype != torch.float64 if self._tiled is None else self._tiled

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self._is_tiled(x):
            return F.linear(x, weight, bias)
        out: Tensor = _TiledLinear.apply(x, weight)
        return out if bias is None else out + bias

    def grouped_linear(self, x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
        rows = itertools.pairwise(bounds.tolist())
        parts = [self.linear(x[i:j], own, None) for own, (i, j) in zip(weight.unbind(0), rows, strict=True) if j > i]
        # Without rows the gradient must be 0, not missing.
        return torch.cat(parts) if parts else self.linear(x, weight[0], None)

    def route(self, logits: Tensor, experts_per_token: int, normalised: bool) -> Routing:
        probabilities = softmax(logits.to(compute_dtype(logits.dtype)))
        gates, experts = probabilities.sort(dim=-1, descending=True, stable=True)
        gates, experts = gates[:, :experts_per_token], experts[:, :experts_per_token]
        if normalised:
            gates = gates / sum_in_order(gates.unbind(1)).unsqueeze(1)
        flat = experts.reshape(-1)
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        bounds = flat.new_zeros(logits.shape[1] + 1)
        torch.cumsum(torch.bincount(flat, minlength=logits.shape[1]), 0, out=bounds[1:])
        return Routing(gates, experts, bounds, order, inverse)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, centred: bool = False) -> Tensor:
        wide = x.contiguous().to(compute_dtype(x.dtype))
        wide = wide - wide.mean(-1, keepdim=True) if centred else wide
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight.to(wide.dtype) * normed.view(-1, *weight.shape)).view(x.shape).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, centred: bool = False) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps, centred), total

    def rope(
        self, qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int],
        q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query_heads, kv_heads, size = heads
        q, k, v = qkv.view(len(qkv), query_heads + 2 * kv_heads, size).split([query_heads, kv_heads, kv_heads], dim=1)
        q = self.rms_norm(q, q_norm, eps) if q_norm is not None else q
        k = self.rms_norm(k, k_norm, eps) if k_norm is not None else k
        cos, sin = cos_sin[positions.long()].to(compute_dtype(qkv.dtype)).unsqueeze(1).chunk(2, dim=-1)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v.contiguous()

    def rope_to_cache(
        self, qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int],
        q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cache: KVLayer, slots: Tensor,
    ) -> Tensor:
        with torch.no_grad():
            q, k, v = self.rope(qkv, positions, cos_sin, heads, q_norm, k_norm, eps)
            blocks, offsets = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
            cache.keys[blocks, :, :, offsets], key_scales = encode(k, cache.keys.dtype)
            cache.values[blocks, :, offsets], value_scales = encode(v, cache.values.dtype)
            for scales, own in ((cache.key_scales, key_scales), (cache.value_scales, value_scales)):
                if scales is not None and own is not None:
                    scales[blocks, :, offsets] = own
            return q

    def round_kv(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        rounded: Tensor = RoundKV.apply(x, dtype)
        return rounded

    def packed_attention(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int | None,
        query_start: Tensor | None = None, cap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:
        bounds = cu_seqlens.tolist()
        queries = bounds if query_start is None else query_start.tolist()
        parts = [
            attend(q[first:last], k[start:end], v[start:end], (end - start) - (last - first), scale, window, cap, sinks)
            for (start, end), (first, last) in zip(itertools.pairwise(bounds), itertools.pairwise(queries), strict=True)
            if last > first
        ]
        return torch.cat(parts) if parts else q.new_empty(len(q), q.shape[1], v.shape[2])

    def paged_attention(
        self, q: Tensor, cache: KVLayer, batch: PagedBatch, scale: float, window: int | None, cap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        out = torch.empty_like(q)
        with torch.no_grad():
            for start, end, length, blocks in _sequences(batch):
                first = length - (end - start)
                behind = 0 if window is None else max(0, first - window + 1) // BLOCK_TOKENS
                k, v = gather(cache, blocks, length, behind, q.dtype)
                out[start:end] = attend(q[start:end], k, v, first, scale, window, cap, sinks)
        return out

    def latent_attention(self, q: Tensor, cache: LatentLayer, batch: PagedBatch, scale: float, value_size: int) -> Tensor:
        out = q.new_empty(len(q), q.shape[1], value_size)
        with torch.no_grad():
            for start, end, length, blocks in _sequences(batch):
                rows = read_rows(cache, blocks, length, q.dtype).unsqueeze(1)
                out[start:end] = attend(q[start:end], rows, rows[..., :value_size], length - (end - start), scale, None)
        return out

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor, states: DeltaStates | None = None
    ) -> Tensor:
        return gated_delta_rule(ReferencePasses(), q, k, v, decay, beta, bounds, states)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.to(compute_dtype(gate_up.dtype)).chunk(2, dim=-1)
        # The input of silu is contiguous, so that an element never moves between a vector and a scalar remainder.
        exponent = -gate.contiguous()
        # An exponential that overflows would have a gradient of 0 times infinity.
        overflows = exponent > math.log(torch.finfo(exponent.dtype).max)
        decay = torch.exp(exponent.masked_fill(overflows, 0.0)).masked_fill(overflows, math.inf)
        return (gate / (1 + decay) * up).to(gate_up.dtype)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.to(compute_dtype(gate_up.dtype)).chunk(2, dim=-1)
        gate = gate.contiguous()
        # F.gelu computes the last elements of a tensor by another function than the others, so that their bits depend on the number of rows.
        return (0.5 * gate * (1 + torch.tanh(GELU_SLOPE * (gate + 0.044715 * gate * gate * gate))) * up).to(gate_up.dtype)

    def clamped_swiglu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.to(compute_dtype(gate_up.dtype)).chunk(2, dim=-1)
        gate, up = gate.contiguous().clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        # Where the sigmoid is below 1e-34 it is that constant: an exponential that overflows has no gradient.
        decay = torch.exp((gate * -SWIGLU_ALPHA).clamp(max=MOST_EXPONENT))
        return (gate / (1 + decay) * (up + 1)).to(gate_up.dtype)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return soft_cap(x, cap)

    def token_logprobs(self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, cap: float | None = None) -> TokenLogprobs:
        if not temperature > 0:
            raise ValueError(f"token_logprobs temperature is {temperature}; it must be above 0")
        raw, scaled, entropy = TokenLogprobsFunction.apply(hidden, weight, targets.long(), temperature, self.linear, cap)
        return TokenLogprobs(raw, raw if temperature == 1 else scaled, entropy)

    def logits_logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            return gather_columns(log_softmax(logits), targets.long())

    def sample_rows(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> SampledRows:
        with torch.no_grad():
            greedy = temperature == 0
            divisor = torch.where(greedy, torch.ones_like(temperature), temperature)
            scaled = filter_logits(logits.double() / divisor.double().unsqueeze(1), top_k, top_p, min_p)
            weights = torch.exp(scaled - scaled.amax(-1, keepdim=True))
            cumulative = weights.cumsum(-1)
            threshold = (uniform.double() * cumulative[:, -1]).unsqueeze(1)
            drawn = torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
            # The last token with weight is drawn if rounding moves the threshold to the very end of the sum.
            last = logits.shape[1] - 1 - (weights.flip(-1) > 0).to(torch.uint8).argmax(-1)
            tokens = torch.where(greedy, first_argmax(logits), torch.minimum(drawn, last))
            sampling = gather_columns(scaled.log_softmax(-1), tokens).to(compute_dtype(logits.dtype))
            sampling = torch.where(greedy, torch.zeros_like(sampling), sampling)
            return SampledRows(tokens, self.logits_logprobs(logits, tokens), sampling)


class ReferenceBf16Products(ReferenceKernels):
    """See ``ReferenceKernels.bf16_products``."""

    has_instruction = False

    def __init__(self, rounds: bool) -> None:
        super().__init__()
        self._rounds = rounds

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = Bf16Linear.apply(x, weight, bias, self._rounds)
        return out

    def token_logprobs(self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, cap: float | None = None) -> TokenLogprobs:
        if not temperature > 0:
            raise ValueError(f"token_logprobs temperature is {temperature}; it must be above 0")
        return whole_logprobs(hidden, weight, targets, temperature, cap)


def _sequences(batch: PagedBatch) -> Iterator[tuple[int, int, int, Tensor]]:
    """Yields of each sequence of ``batch`` that has rows: their start and end, its length and its blocks."""
    starts, lengths = batch.query_start.tolist(), batch.context_lens.tolist()
    for s, length in enumerate(lengths):
        if starts[s + 1] > starts[s]:
            yield starts[s], starts[s + 1], length, batch.block_tables[s]


def _is_aligned(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % 64 == 0


def _tiled_product(x: Tensor, weight: Tensor) -> Tensor:
    """Computes ``x[T, K] @ weight[N, K].T`` in products of shape [64, K] x [K, N]."""
    if weight.shape[0] < FEWEST_COLUMNS:
        wide = F.pad(weight, (0, 0, 0, FEWEST_COLUMNS - weight.shape[0]))
        return _tiled_product(x, wide)[:, : weight.shape[0]].contiguous()
    rows, columns = x.shape[0], weight.shape[0]
    padded_rows = -(-rows // TILE_ROWS) * TILE_ROWS
    if padded_rows != rows or not _is_aligned(x):
        padded = x.new_zeros(padded_rows, x.shape[1])
        padded[:rows] = x
        x = padded
    plain = (weight if _is_aligned(weight) else weight.clone(memory_format=torch.contiguous_format)).t()
    out = x.new_empty(padded_rows, columns)
    for start in range(0, padded_rows, TILE_ROWS):
        torch.mm(x[start : start + TILE_ROWS], plain, out=out[start : start + TILE_ROWS])
    return out[:rows]


class _TiledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _tiled_product(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return (
            grad @ weight if ctx.needs_input_grad[0] else None,
            grad.t() @ x if ctx.needs_input_grad[1] else None,
        )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
