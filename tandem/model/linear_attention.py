"""The forward pass of linear attention by the gated delta rule (Yang et al., 2024, arXiv 2412.06464, section 3.4; Qwen3-Next): over packed sequences in the
trainer, also on context-parallel ranks, over kept states in the engine.

A short causal convolution reads each token's queries, keys and values with those of the tokens before it; each head then reads and corrects its matrix. Both
are computed token by token with one order of sums, so that engine and trainer have the same bits, however tokens come.
"""

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.kernels.api import DeltaStates, Kernels, PagedBatch, StateLayer, sum_in_order
from tandem.layout.linear_attention import L2_EPS
from tandem.model.attention import AttentionLayer, PackedContext, PagedContext, logistic
from tandem.model.linear_attention_weights import LinearAttentionWeights
from tandem.model.lora import LoraLayer
from tandem.model.parallel.collective_ops import exchanged
from tandem.model.parallel.context_parallel import SharedContext
from tandem.model.shared_prompts import gathered_rows_of

if TYPE_CHECKING:
    from tandem.model.layer_pass import LayerBatch


def linear_attention(batch: "LayerBatch", layer: AttentionLayer, weights: LinearAttentionWeights, x: Tensor) -> Tensor:
    """Computes the linear attention of the normed input ``x[T, H]`` of a layer -> [T, Hv Dv]."""
    kernels, context, sizes = batch.kernels, batch.context, weights.sizes
    groups, repeats = sizes.num_key_heads, sizes.num_value_heads // sizes.num_key_heads
    changes = LoraLayer() if batch.lora is None else batch.lora.stacks.layers[layer.index]
    of_group = batch.adapted(x, weights.qkvz, None, changes.qkvz).unflatten(1, (groups, -1))
    values = repeats * sizes.value_head_dim
    q, k, v, z = of_group.split([sizes.key_head_dim, sizes.key_head_dim, values, values], dim=2)
    b, a = batch.adapted(x, weights.ba, None, changes.ba).unflatten(1, (groups, -1)).split([repeats, repeats], dim=2)
    mixed, z = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=1), z.reshape(-1, sizes.value_head_dim)
    # In at least fp32, as in transformers.
    mixed, b, a = (_wide(each) for each in (mixed, b.flatten(1), a.flatten(1)))
    beta = logistic(b)
    decay = torch.exp(-torch.exp(_wide(weights.decay_log)) * _softplus(a + _wide(weights.decay_bias)))
    if isinstance(context, PagedContext):
        cache = context.caches[layer.index]
        assert isinstance(cache, StateLayer)
        out = _over_states(kernels, weights, mixed, decay, beta, context.batch, cache)
    elif isinstance(context, PackedContext):
        out = _over_sequences(kernels, weights, mixed, decay, beta, context)
    else:
        out = _over_ranks(kernels, weights, mixed, decay, beta, context)
    normed = kernels.rms_norm(out.reshape(-1, sizes.value_head_dim).to(x.dtype), weights.norm, layer.eps)
    return kernels.silu_mul(torch.cat((z, normed), dim=1)).view(len(x), sizes.value_size)


def _over_sequences(kernels: Kernels, weights: LinearAttentionWeights, mixed: Tensor, decay: Tensor, beta: Tensor, context: PackedContext) -> Tensor:
    prompts = context.prompts
    if prompts is None:
        return _recurrence(kernels, weights, _convolved(kernels, weights, mixed, context.cu_seqlens), decay, beta, context.cu_seqlens)
    # A shared prompt is computed with each of its sequences; of all but the first only what follows it is wanted.
    mixed, decay, beta = (gathered_rows_of(each, prompts) for each in (mixed, decay, beta))
    out = _recurrence(kernels, weights, _convolved(kernels, weights, mixed, context.cu_seqlens), decay, beta, context.cu_seqlens)
    ends, own = context.cu_seqlens.tolist()[1:], prompts.query_start.tolist()
    return torch.cat([out[end - (last - first) : end] for end, (first, last) in zip(ends, itertools.pairwise(own), strict=True)])


def _over_ranks(kernels: Kernels, weights: LinearAttentionWeights, mixed: Tensor, decay: Tensor, beta: Tensor, context: SharedContext) -> Tensor:
    """Computes the recurrence of this context-parallel rank's tokens. An all-to-all gives each rank all tokens of some heads, which are independent of each
    other, and another returns their outputs, as of softmax attention (``model.parallel.context_parallel``)."""
    sizes, ranks, counts, tokens = weights.sizes, context.ranks, context.counts, len(mixed)
    packed = PackedContext(context.cu_seqlens, context.max_seqlen)
    own, here = sizes.of_one_rank(ranks.size), [tokens] * ranks.size
    decays, betas = decay.chunk(ranks.size, dim=1), beta.chunk(ranks.size, dim=1)
    channels = [sizes.channels(rank, ranks.size) for rank in range(ranks.size)]
    parts = [torch.cat((*(mixed[:, part] for part in channels[rank]), decays[rank], betas[rank]), dim=1) for rank in range(ranks.size)]
    arrived = exchanged(torch.cat(parts), here, counts, ranks, "tokens for heads of linear attention")
    mixed, decay, beta = arrived.split([own.mixed_size, own.num_value_heads, own.num_value_heads], dim=1)
    # The gradient of the others' channels is 0 here.
    convolution = weights.own_convolution()
    convolution = torch.cat([convolution[part] for part in channels[ranks.rank]]).unsqueeze(1)
    out = _over_sequences(kernels, weights._replace(sizes=own, convolution=convolution, channels=None), mixed, decay, beta, packed)
    back = exchanged(out.contiguous(), counts, here, ranks, "heads of linear attention for tokens")
    return back.view(ranks.size, tokens, own.num_value_heads, own.value_head_dim).transpose(0, 1).flatten(1, 2)


def _over_states(
    kernels: Kernels, weights: LinearAttentionWeights, mixed: Tensor, decay: Tensor, beta: Tensor, batch: PagedBatch, cache: StateLayer
) -> Tensor:
    assert batch.state_rows is not None, "the batch has no rows of states"
    bounds, rows = batch.query_start.long(), batch.state_rows
    fresh = batch.context_lens.long() == bounds.diff()
    past = cache.inputs.index_select(0, rows).masked_fill(fresh.view(-1, 1, 1), 0.0)
    convolved = _convolved(kernels, weights, mixed, bounds, past)
    cache.inputs.index_copy_(0, rows, _inputs_before(mixed, bounds, past, torch.arange(len(past), device=mixed.device), bounds[1:]))
    kept = None
    if batch.kept_states is not None:
        tokens, targets = batch.kept_states
        sequences = torch.searchsorted(bounds, tokens, right=True) - 1
        cache.inputs.index_copy_(0, targets, _inputs_before(mixed, bounds, past, sequences, tokens + 1))
        kept = torch.full_like(batch.slots, -1).index_copy_(0, tokens, targets)
    return _recurrence(kernels, weights, convolved, decay, beta, bounds, DeltaStates(cache.matrices, rows, fresh, kept))


def _recurrence(
    kernels: Kernels, weights: LinearAttentionWeights, mixed: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor, states: DeltaStates | None = None
) -> Tensor:
    sizes = weights.sizes
    q, k, v = mixed.split([sizes.key_size, sizes.key_size, sizes.value_size], dim=1)
    size = sizes.key_head_dim
    # x / sqrt(sum x^2 + eps) is a root-mean-square norm whose weights are 1 / sqrt(size); queries are divided by sqrt(size) once more.
    unit = lambda x, scale: kernels.rms_norm(x.reshape(-1, size), x.new_full((size,), scale), L2_EPS / size).view(len(x), -1, size)
    return kernels.gated_delta_rule(
        unit(q, 1.0 / size), unit(k, size**-0.5), v.reshape(len(v), -1, sizes.value_head_dim).contiguous(), decay, beta, bounds, states
    )  # fmt: skip


def _convolved(kernels: Kernels, weights: LinearAttentionWeights, x: Tensor, bounds: Tensor, past: Tensor | None = None) -> Tensor:
    """Returns the SiLU of the causal convolution of ``x[T, C]`` within the sequences marked by ``bounds[S + 1]``. ``past[S, K - 1, C]``: the inputs before each
    (``None``: zeros). Taps are added in the order of their tokens."""
    behind, bounds = weights.sizes.kernel_size - 1, bounds.long()
    if past is None:
        past = x.new_zeros(len(bounds) - 1, behind, x.shape[1])
    sequence = torch.arange(len(bounds) - 1, device=x.device).repeat_interleave(bounds.diff(), output_size=len(x))
    token = torch.arange(len(x), device=x.device)
    offset, rows = token - bounds[sequence], torch.cat((x, past.flatten(0, 1)))
    before = len(x) + (sequence + 1) * behind + offset
    factors = _wide(weights.own_convolution()).unbind(1)
    taps = [rows.index_select(0, torch.where(offset >= back, token, before) - back) for back in range(behind, -1, -1)]
    summed = sum_in_order([tap * factor for tap, factor in zip(taps, factors, strict=True)])
    return kernels.silu_mul(torch.cat((summed, torch.ones_like(summed)), dim=1))


def _inputs_before(x: Tensor, bounds: Tensor, past: Tensor, sequences: Tensor, ends: Tensor) -> Tensor:
    """Returns the K - 1 inputs before token ``ends[M]`` of ``x`` in the sequence ``sequences[M]``, of ``past`` and its new ones in ``x``: [M, K - 1, C]."""
    behind = past.shape[1]
    token = ends.unsqueeze(1) - behind + torch.arange(behind, device=x.device)
    offset = token - bounds[sequences].unsqueeze(1)
    index = torch.where(offset >= 0, token, len(x) + (sequences.unsqueeze(1) + 1) * behind + offset)
    return torch.cat((x, past.flatten(0, 1))).index_select(0, index.flatten()).view(len(ends), behind, -1)


def _softplus(x: Tensor) -> Tensor:
    """Returns log(1 + exp(x)); torch's own gives the last elements of a tensor other bits than the others."""
    return x.clamp_min(0.0) + torch.log1p(torch.exp(-x.abs()))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
