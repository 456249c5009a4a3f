"""The kernels in plain torch: any dtype, any device, differentiable, and under the law of ``api`` without a compiler.

A matrix product of torch gives a row other bits when the number of rows beside it changes, because the library picks
its inner kernel by shape. Here every product has a shape that does not depend on the batch: linear layers multiply
tiles of ``TILE_ROWS`` rows, and attention multiplies tiles of ``TILE_ROWS`` absolute positions in which a query stands
at its own row. Inputs are copied to aligned memory first: alignment is the other thing that a library may look at.

float64 is the path of truth for values and gradients; it skips the tiles unless asked.
"""

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.api import (
    BLOCK_TOKENS,
    KVLayer,
    PackedGroups,
    PackedWeight,
    PagedBatch,
    Routing,
    SampledRows,
    TokenLogprobs,
    sum_in_order,
)
from tandem.kernels.kv_dtype import RoundKV, decode, encode
from tandem.kernels.quantized import (
    PackedParts,
    PackedQuantized,
    QuantizedWeight,
    dequantize,
    int8_linear,
    keep_codes,
    round_inputs,
    with_parts,
)

TILE_ROWS = 64
FEWEST_COLUMNS = 16
"""Narrower products (2 to 11 columns were seen) give a row other bits by its place in the tile; they are padded."""
_CHUNK_ELEMENTS = 1 << 22
"""Logits that ``token_logprobs`` holds at a time."""


class ReferenceKernels:
    """``tiled``: keep the law bit for bit (slower); ``None``: for every dtype but float64."""

    name = "reference"

    def __init__(self, tiled: bool | None = None) -> None:
        self._tiled = tiled

    def _is_tiled(self, x: Tensor) -> bool:
        return x.dtype != torch.float64 if self._tiled is None else self._tiled

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self._is_tiled(x):
            return F.linear(x, weight, bias)
        out: Tensor = _TiledLinear.apply(x, weight)
        return out if bias is None else out + bias

    def pack(self, weight: Tensor) -> PackedWeight:
        rows, columns = weight.shape
        return PackedWeight(weight.detach().clone(memory_format=torch.contiguous_format), rows, columns)

    def pack_quantized(self, weight: QuantizedWeight) -> PackedQuantized:
        return keep_codes(weight)

    def linear_packed(
        self, x: Tensor, weight: PackedWeight | PackedQuantized | PackedParts, bias: Tensor | None
    ) -> Tensor:
        with torch.no_grad():
            if isinstance(weight, PackedWeight):
                return self.linear(x, weight.data, bias)
            if isinstance(weight, PackedParts):
                return with_parts(self.linear_packed, x, weight, bias)
            if weight.is_integer_product:
                return int8_linear(x, weight, bias)
            return self.linear(round_inputs(x, weight), dequantize(weight).to(x.dtype), bias)

    def gated_mlp_packed(
        self, x: Tensor, gate_up: PackedWeight, gate_up_bias: Tensor | None, down: PackedWeight, down_bias: Tensor | None
    ) -> Tensor:
        with torch.no_grad():
            return self.linear_packed(self.silu_mul(self.linear_packed(x, gate_up, gate_up_bias)), down, down_bias)

    def grouped_linear(self, x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
        rows = itertools.pairwise(bounds.tolist())
        parts = [self.linear(x[i:j], own, None) for own, (i, j) in zip(weight.unbind(0), rows, strict=True) if j > i]
        # Without a row the gradient is 0, and not absent.
        return torch.cat(parts) if parts else self.linear(x, weight[0], None)

    def route(self, logits: Tensor, experts_per_token: int, normalised: bool) -> Routing:
        probabilities = logits.to(_compute_dtype(logits.dtype)).softmax(-1)
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

    def pack_groups(self, weight: Tensor) -> PackedGroups:
        return PackedGroups(weight.detach().clone(memory_format=torch.contiguous_format), *weight.shape[1:])

    def grouped_linear_packed(self, x: Tensor, weight: PackedGroups, bounds: Tensor) -> Tensor:
        with torch.no_grad():
            return self.grouped_linear(x, weight.data, bounds)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.contiguous().to(_compute_dtype(x.dtype))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight.to(wide.dtype) * normed).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rope(
        self, qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int],
        q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        query_heads, kv_heads, size = heads
        q, k, v = qkv.view(len(qkv), query_heads + 2 * kv_heads, size).split([query_heads, kv_heads, kv_heads], dim=1)
        q = self.rms_norm(q, q_norm, eps) if q_norm is not None else q
        k = self.rms_norm(k, k_norm, eps) if k_norm is not None else k
        cos, sin = cos_sin[positions.long()].to(_compute_dtype(qkv.dtype)).unsqueeze(1).chunk(2, dim=-1)
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
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int | None
    ) -> Tensor:
        bounds = cu_seqlens.tolist()
        parts = [
            _attend(q[start:end], k[start:end], v[start:end], 0, scale, window)
            for start, end in itertools.pairwise(bounds)
            if end > start
        ]
        return torch.cat(parts) if parts else torch.empty_like(q)

    def paged_attention(self, q: Tensor, cache: KVLayer, batch: PagedBatch, scale: float, window: int | None) -> Tensor:
        out = torch.empty_like(q)
        starts, lengths = batch.query_start.tolist(), batch.context_lens.tolist()
        with torch.no_grad():
            for s, length in enumerate(lengths):
                start, end = starts[s], starts[s + 1]
                if end > start:
                    first = length - (end - start)
                    behind = 0 if window is None else max(0, first - window + 1) // BLOCK_TOKENS
                    k, v = _gather(cache, batch.block_tables[s], length, behind, q.dtype)
                    out[start:end] = _attend(q[start:end], k, v, first, scale, window)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.to(_compute_dtype(gate_up.dtype)).chunk(2, dim=-1)
        # silu sees contiguous memory, so that an element never moves between a vector and a scalar remainder.
        return (gate / (1 + torch.exp(-gate.contiguous())) * up).to(gate_up.dtype)

    def token_logprobs(self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> TokenLogprobs:
        if not temperature > 0:
            raise ValueError(f"token_logprobs temperature is {temperature}; it must be above 0")
        raw, scaled, entropy = _TokenLogprobs.apply(hidden, weight, targets.long(), temperature, self)
        return TokenLogprobs(raw, raw if temperature == 1 else scaled, entropy)

    def logits_logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            return _gather_columns(_log_softmax(logits), targets.long())

    def sample_rows(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> SampledRows:
        with torch.no_grad():
            greedy = temperature == 0
            divisor = torch.where(greedy, torch.ones_like(temperature), temperature)
            scaled = _filter(logits.double() / divisor.double().unsqueeze(1), top_k, top_p, min_p)
            weights = torch.exp(scaled - scaled.amax(-1, keepdim=True))
            cumulative = weights.cumsum(-1)
            threshold = (uniform.double() * cumulative[:, -1]).unsqueeze(1)
            drawn = torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
            # The last token with weight: where rounding carries the threshold to the very end of the sum.
            last = logits.shape[1] - 1 - (weights.flip(-1) > 0).to(torch.uint8).argmax(-1)
            tokens = torch.where(greedy, _first_argmax(logits), torch.minimum(drawn, last))
            sampling = _gather_columns(scaled.log_softmax(-1), tokens).to(_compute_dtype(logits.dtype))
            sampling = torch.where(greedy, torch.zeros_like(sampling), sampling)
            return SampledRows(tokens, self.logits_logprobs(logits, tokens), sampling)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _is_aligned(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % 64 == 0


def _tiled_product(x: Tensor, weight: Tensor) -> Tensor:
    """``x[T, K] @ weight[N, K].T`` in products of shape [64, K] x [K, N]."""
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


def _gather(cache: KVLayer, table: Tensor, length: int, behind: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The first ``length`` keys and values, each [length, Hkv, D], that ``table[B]`` names; zeros for its first ``behind``
    blocks, which no query sees and which may belong to others by now."""
    blocks = table[behind : -(-length // BLOCK_TOKENS)].long()
    skipped = behind * BLOCK_TOKENS
    key_scales = None if cache.key_scales is None else cache.key_scales[blocks].unsqueeze(2)
    value_scales = None if cache.value_scales is None else cache.value_scales[blocks].unsqueeze(3)
    keys = decode(cache.keys[blocks], key_scales, dtype).permute(0, 3, 1, 2).flatten(0, 1)[: length - skipped]
    values = decode(cache.values[blocks], value_scales, dtype).permute(0, 2, 1, 3).flatten(0, 1)[: length - skipped]
    return F.pad(keys, (0, 0, 0, 0, skipped, 0)), F.pad(values, (0, 0, 0, 0, skipped, 0))


def _attend(q: Tensor, k: Tensor, v: Tensor, first: int, scale: float, window: int | None) -> Tensor:
    """``q[n, Hq, D]`` at positions ``first .. first + n - 1`` over ``k, v[first + n, Hkv, D]`` -> [n, Hq, D].

    A row that sees a value that is not finite is NaN; to one that does not, it is 0. Tile t holds the positions
    ``64 t .. 64 t + 63``: always a product of [Hkv, G 64, D] with [Hkv, D, 64 (t + 1)].
    """
    count, query_heads, size = q.shape
    kv_heads, group = k.shape[1], query_heads // k.shape[1]
    last = first + count
    end = -(-last // TILE_ROWS) * TILE_ROWS
    keys = F.pad(k, (0, 0, 0, 0, 0, end - last)).permute(1, 2, 0)
    values = F.pad(v, (0, 0, 0, 0, 0, end - last)).permute(1, 0, 2)
    wrong = None if bool(values.isfinite().all()) else ~values.isfinite()
    if wrong is not None:
        values = values.masked_fill(wrong, 0.0)
    tiles = []
    for tile in range(first // TILE_ROWS, end // TILE_ROWS):
        begin, width = tile * TILE_ROWS, (tile + 1) * TILE_ROWS
        low, high = max(first, begin), min(last, width)
        rows = F.pad(q[low - first : high - first], (0, 0, 0, 0, low - begin, width - high))
        rows = rows.view(TILE_ROWS, kv_heads, group, size).permute(1, 2, 0, 3).reshape(kv_heads, -1, size)
        scores = torch.bmm(rows, keys[:, :, :width].contiguous()) * scale
        at = torch.arange(begin, width, device=q.device).unsqueeze(1)
        seen = torch.arange(width, device=q.device).unsqueeze(0)
        hidden = seen > at
        if window is not None:
            hidden = hidden | (seen <= at - window)
        scores = scores.view(kv_heads, group, TILE_ROWS, width).masked_fill(hidden, -math.inf)
        weights = scores.to(_compute_dtype(q.dtype)).softmax(-1).to(q.dtype).view(kv_heads, group * TILE_ROWS, width)
        out = torch.bmm(weights, values[:, :width].contiguous())
        if wrong is not None:
            sees = (~hidden).to(q.dtype).repeat(group, 1).expand(kv_heads, -1, -1)
            out = out.masked_fill(torch.bmm(sees, wrong[:, :width].to(q.dtype)) > 0, math.nan)
        out = out.view(kv_heads, group, TILE_ROWS, size).permute(2, 0, 1, 3).reshape(TILE_ROWS, query_heads, size)
        tiles.append(out[low - begin : high - begin])
    return torch.cat(tiles)


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.contiguous().log_softmax(-1, dtype=_compute_dtype(logits.dtype))


def _gather_columns(x: Tensor, columns: Tensor) -> Tensor:
    return x.gather(1, columns.unsqueeze(1)).squeeze(1)


class _TokenLogprobs(torch.autograd.Function):
    """Logits are computed chunk by chunk, and again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, kernels: ReferenceKernels
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature, ctx.kernels = temperature, kernels
        raw = hidden.new_empty(len(hidden), dtype=_compute_dtype(hidden.dtype))
        scaled, entropy = torch.empty_like(raw), torch.empty_like(raw)
        for rows in _chunks(hidden, weight):
            logits = kernels.linear(hidden[rows], weight, None)
            logprobs = _log_softmax(logits)
            raw[rows] = _gather_columns(logprobs, targets[rows])
            if temperature != 1:
                logprobs = _log_softmax(logits / temperature)
                scaled[rows] = _gather_columns(logprobs, targets[rows])
            # A token of probability 0 has entropy 0, and not 0 * -inf.
            entropy[rows] = -(logprobs.exp() * logprobs.clamp_min(torch.finfo(logprobs.dtype).min)).sum(-1)
        ctx.mark_non_differentiable(entropy)
        return raw, scaled, entropy

    @staticmethod
    def backward(ctx: Any, grad_raw: Tensor, grad_scaled: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows in _chunks(hidden, weight):
            logits = ctx.kernels.linear(hidden[rows], weight, None)
            grad = _logprob_grad(_log_softmax(logits), targets[rows], grad_raw[rows])
            if ctx.temperature != 1:
                scaled = _log_softmax(logits / ctx.temperature)
                grad += _logprob_grad(scaled, targets[rows], grad_scaled[rows] / ctx.temperature)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.addmm_(grad.t(), hidden[rows])
        return grad_hidden, grad_weight, None, None, None


def _logprob_grad(logprobs: Tensor, targets: Tensor, grad: Tensor) -> Tensor:
    """The gradient of ``log_softmax(z)[target]`` by z, ``onehot - softmax(z)``, times ``grad[T]``."""
    out = logprobs.exp_().mul_(-grad.unsqueeze(1))
    return out.scatter_add_(1, targets.unsqueeze(1), grad.unsqueeze(1))


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // weight.shape[0] // TILE_ROWS) * TILE_ROWS
    return [slice(start, min(start + size, len(hidden))) for start in range(0, len(hidden), size)]


def _first_argmax(x: Tensor) -> Tensor:
    """The lowest index among equals: torch's argmax leaves that open."""
    return (x == x.amax(-1, keepdim=True)).to(torch.uint8).argmax(-1)


def _filter(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """min-p, then top-k, then top-p on what is left, in vLLM's order. Filtered logits become -inf; among equal logits
    the lowest ids stay."""
    width = scaled.shape[1]
    if bool((min_p > 0).any()):
        floor = scaled.amax(-1, keepdim=True) + min_p.double().log().unsqueeze(1)
        scaled = scaled.masked_fill(scaled < floor, -math.inf)
    if bool((top_k > 0).any()) or bool((top_p < 1).any()):
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(width, device=scaled.device)
        limit = torch.where(top_k > 0, top_k, torch.full_like(top_k, width)).unsqueeze(1)
        ordered = ordered.masked_fill(rank >= limit, -math.inf)
        weights = ordered.softmax(-1)
        before = weights.cumsum(-1) - weights
        dropped = (before >= top_p.double().unsqueeze(1)) & (top_p < 1).unsqueeze(1) & (rank > 0)
        scaled = torch.full_like(scaled, -math.inf).scatter(1, order, ordered.masked_fill(dropped, -math.inf))
    return scaled
