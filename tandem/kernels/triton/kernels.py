"""The Triton programs behind the interface of ``tandem.kernels.api``."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.api import DeltaStates, KVLayer, LatentLayer, PagedBatch, Routing, SampledRows, TokenLogprobs, sum_in_order
from tandem.kernels.gated_delta import gated_delta_rule
from tandem.kernels.last_queries import attend_last
from tandem.kernels.latent_cache import attend_wide
from tandem.kernels.plain_packing import PlainPacking
from tandem.kernels.reference import ReferenceKernels
from tandem.kernels.triton import attention, autograd, latent_attention, rope, rows
from tandem.kernels.triton import linear as products
from tandem.kernels.triton import logits as logit_calls
from tandem.kernels.triton.autograd import through_reference, wants_grad
from tandem.kernels.triton.gated_delta import MOST_NUMBERS, TritonPasses
from tandem.kernels.triton.launch import DTYPES, IS_INTERPRETED
from tandem.kernels.triton.tiles import INTERPRETED, Tiles, tiles_for
from tandem.layout import lm_head as sizes
from tandem.layout.shapes import Activation


class TritonKernels(PlainPacking):
    """fp32, bf16 and fp16 on CUDA, with fp32 sums; float64 uses the reference kernels.

    ``deterministic``: the bits of a row depend only on the row (and, in attention, on what it attends to). Otherwise products are torch's,
    which split their sums by the number of rows. ``tiles``: overrides those for the dtype, for tests. ``splits``: see ``attention.paged``.
    """

    name = "triton"
    # There is no program that decodes the codes of groups as it multiplies; decoding whole ones for each product would cost more than it saves.
    multiplies_coded_groups = False

    def __init__(self, deterministic: bool = True, tiles: Tiles | None = None, splits: bool | None = None) -> None:
        self.deterministic = deterministic
        self._splits = splits
        self._reference = ReferenceKernels(tiled=False)
        self._delta = TritonPasses(deterministic)
        chosen = tiles or (INTERPRETED if IS_INTERPRETED else None)
        self._tiles = {dtype: chosen or tiles_for(dtype) for dtype in DTYPES}
        self._linear_tiles = {dtype: products.LinearTiles(own.linear, checks=deterministic) for dtype, own in self._tiles.items()}

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype not in DTYPES or not self.deterministic:
            return F.linear(x, weight, bias)
        if wants_grad(x, weight, bias):
            return autograd.Linear.apply(x, weight, bias, self._multiply)  # type: ignore[no-any-return]
        return self._multiply(x, weight, bias)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype not in DTYPES or not self.deterministic:
            return F.linear(x, weight, bias)
        return products.linear(x, weight, bias, self._linear_tiles[x.dtype].choose(x, len(weight)))

    def grouped_linear(self, x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
        if x.dtype not in DTYPES or not self.deterministic:
            return self._reference.grouped_linear(x, weight, bounds)
        if wants_grad(x, weight):
            return autograd.GroupedLinear.apply(x, weight, bounds, self._multiply_groups)  # type: ignore[no-any-return]
        return self._multiply_groups(x, weight, bounds)

    def _multiply_groups(self, x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
        # Only the device knows how the rows are distributed over the groups; the smallest tile wastes least.
        return products.grouped_linear(x, weight, bounds, self._linear_tiles[x.dtype].agreeing(x.device, x.dtype)[0])

    def route(self, logits: Tensor, experts_per_token: int, normalised: bool) -> Routing:
        probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        gates, experts = probabilities.sort(dim=-1, descending=True, stable=True)
        gates, experts = gates[:, :experts_per_token], experts[:, :experts_per_token]
        if normalised:
            gates = gates / sum_in_order(gates.unbind(1)).unsqueeze(1)
        ordered, order = experts.reshape(-1).sort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        # A search instead of ``bincount``, for which torch would synchronize with the device.
        bounds = torch.searchsorted(ordered, torch.arange(logits.shape[1] + 1, device=order.device))
        return Routing(gates, experts, bounds, order, inverse)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, centred: bool = False) -> Tensor:
        if x.dtype not in DTYPES:
            return self._reference.rms_norm(x, weight, eps, centred)
        if wants_grad(x, weight):
            return autograd.RmsNorm.apply(x, None, weight, eps, centred)[0]  # type: ignore[no-any-return]
        return rows.rms_norm(x, None, weight, eps, centred)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, centred: bool = False) -> tuple[Tensor, Tensor]:
        if x.dtype not in DTYPES:
            return self._reference.add_rms_norm(x, residual, weight, eps, centred)
        if wants_grad(x, residual, weight):
            return autograd.RmsNorm.apply(x, residual, weight, eps, centred)  # type: ignore[no-any-return]
        return rows.rms_norm(x, residual, weight, eps, centred)

    def rope(
        self, qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int],
        q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if qkv.dtype not in DTYPES:
            return self._reference.rope(qkv, positions, cos_sin, heads, q_norm, k_norm, eps)
        if q_norm is None and k_norm is None and wants_grad(qkv):
            return autograd.Rope.apply(qkv, positions, cos_sin, heads, eps)  # type: ignore[no-any-return]
        q, k, v = through_reference(
            lambda qkv, q_norm, k_norm: rope.rope(qkv, positions, cos_sin, heads, q_norm, k_norm, eps),
            lambda qkv, q_norm, k_norm: self._reference.rope(qkv, positions, cos_sin, heads, q_norm, k_norm, eps), qkv, q_norm, k_norm,
        )  # fmt: skip
        return q, k, v

    def rope_to_cache(
        self, qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int],
        q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cache: KVLayer, slots: Tensor,
    ) -> Tensor:
        if qkv.dtype not in DTYPES:
            return self._reference.rope_to_cache(qkv, positions, cos_sin, heads, q_norm, k_norm, eps, cache, slots)
        return rope.rope_to_cache(qkv, positions, cos_sin, heads, q_norm, k_norm, eps, cache, slots)

    def round_kv(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self._reference.round_kv(x, dtype)

    def packed_attention(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int | None,
        query_start: Tensor | None = None, cap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:
        if q.dtype not in DTYPES:
            return self._reference.packed_attention(q, k, v, cu_seqlens, max_seqlen, scale, window, query_start, cap, sinks)
        narrow = v.shape[2] != k.shape[2]
        if narrow and not (window is None and cap is None and sinks is None):
            return attend_wide(self.packed_attention, q, k, v, cu_seqlens, max_seqlen, scale, window, query_start, cap, sinks)
        if query_start is not None:
            return attend_last(self.packed_attention, q, k, v, cu_seqlens, max_seqlen, scale, window, query_start, cap=cap, sinks=sinks)
        if narrow:
            if wants_grad(q, k, v):
                return autograd.LatentAttention.apply(q, k, v, cu_seqlens, scale, self._tiles[q.dtype])  # type: ignore[no-any-return]
            return latent_attention.packed(q, k, v, cu_seqlens, scale, self._tiles[q.dtype])
        if wants_grad(q, k, v, sinks):
            return autograd.PackedAttention.apply(q, k, v, cu_seqlens, scale, window, cap, self._tiles[q.dtype], sinks)  # type: ignore[no-any-return]
        return attention.packed(q, k, v, cu_seqlens, scale, window, self._tiles[q.dtype], cap=cap, sinks=sinks)

    def paged_attention(
        self, q: Tensor, cache: KVLayer, batch: PagedBatch, scale: float, window: int | None, cap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        if q.dtype not in DTYPES:
            return self._reference.paged_attention(q, cache, batch, scale, window, cap, sinks)
        return attention.paged(q, cache, batch, scale, window, self._tiles[q.dtype], self._splits, cap, sinks)

    def latent_attention(self, q: Tensor, cache: LatentLayer, batch: PagedBatch, scale: float, value_size: int) -> Tensor:
        if q.dtype not in DTYPES:
            return self._reference.latent_attention(q, cache, batch, scale, value_size)
        return latent_attention.paged(q, cache, batch, scale, value_size, self._tiles[q.dtype])

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor, states: DeltaStates | None = None
    ) -> Tensor:
        if v.dtype not in DTYPES or (q.shape[2] > MOST_NUMBERS and not IS_INTERPRETED):
            return self._reference.gated_delta_rule(q, k, v, decay, beta, bounds, states)
        return gated_delta_rule(self._delta, q, k, v, decay, beta, bounds, states)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.dtype not in DTYPES:
            return self._reference.silu_mul(gate_up)
        return self._gate_mul(gate_up, "silu")

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.dtype not in DTYPES:
            return self._reference.gelu_mul(gate_up)
        return self._gate_mul(gate_up, "gelu_pytorch_tanh")

    def clamped_swiglu_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.dtype not in DTYPES:
            return self._reference.clamped_swiglu_mul(gate_up)
        return self._gate_mul(gate_up, "clamped_swiglu")

    def _gate_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return autograd.GateMul.apply(gate_up, activation) if wants_grad(gate_up) else rows.gate_mul(gate_up, activation)  # type: ignore[no-any-return]

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        if x.dtype not in DTYPES:
            return self._reference.soft_cap(x, cap)
        return autograd.SoftCap.apply(x, cap) if wants_grad(x) else rows.soft_cap(x, cap)  # type: ignore[no-any-return]

    def token_logprobs(self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, cap: float | None = None) -> TokenLogprobs:
        if not temperature > 0:
            raise ValueError(f"token_logprobs temperature is {temperature}; it must be above 0")
        if hidden.dtype not in DTYPES:
            return self._reference.token_logprobs(hidden, weight, targets, temperature, cap)
        chunks = sizes.row_chunks(len(hidden), len(weight), sizes.GPU_LOGITS)
        raw, scaled, entropy = autograd.TokenLogprobs.apply(
            hidden, weight, targets.long(), temperature, self._multiply, self._tiles[hidden.dtype].vocabulary, chunks, cap
        )
        return TokenLogprobs(raw, raw if temperature == 1 else scaled, entropy)

    def logits_logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        if logits.dtype not in DTYPES:
            return self._reference.logits_logprobs(logits, targets)
        return logit_calls.logprobs(logits, targets, None, self._tiles[logits.dtype].vocabulary).raw

    def sample_rows(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> SampledRows:
        if logits.dtype not in DTYPES:
            return self._reference.sample_rows(logits, temperature, top_k, top_p, min_p, uniform)
        return logit_calls.sample(logits, temperature, top_k, top_p, min_p, uniform, self._tiles[logits.dtype].vocabulary)
