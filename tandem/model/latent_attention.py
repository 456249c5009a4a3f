"""The forward pass of multi-head latent attention (DeepSeek-AI, 2024, "DeepSeek-V2", section 2.1), in the absorbed form.

A token's compressed vector and the rotated part of its key are one row, which is the key of all heads; the compressed vector alone is their value. A head's
queries are multiplied with its part of ``kv_b_proj`` for keys, and what attention returns with that for values: the sums are those of keys and values
expanded for each head, in another order. Engine and trainer compute the same products, so that they have the same bits, however tokens come.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem.kernels.api import LatentLayer
from tandem.kernels.latent_cache import write_rows
from tandem.layout.latent_attention import NORM_EPS
from tandem.model.attention import AttentionLayer, PagedContext, attend_packed
from tandem.model.latent_projections import LatentWeights
from tandem.model.lora import LoraLayer

if TYPE_CHECKING:
    from tandem.model.layer_pass import LayerBatch


_UNCHANGED = LoraLayer()


def latent_attention(batch: "LayerBatch", layer: AttentionLayer, weights: LatentWeights, x: Tensor) -> Tensor:
    """Computes the attention of the normed input ``x[t, H]`` of a layer -> [T, Hq Dv]. Compressed vectors are computed where the residual stream is, by every
    tensor-parallel rank whole or with sequence parallelism for its own t tokens, and enter the products of heads as the input of other layers does."""
    kernels, context, sizes, heads = batch.kernels, batch.context, weights.sizes, weights.heads
    positions, cos_sin, order = batch.rotations[layer.rotation]
    nope, rope, rank = sizes.qk_nope_head_dim, sizes.qk_rope_head_dim, sizes.kv_lora_rank
    changes = _UNCHANGED if batch.lora is None else batch.lora.stacks.layers[layer.index]
    row = batch.adapted(x, weights.kv_a, weights.kv_a_bias, changes.kv_a)
    row = torch.cat((kernels.rms_norm(row[:, :rank].contiguous(), weights.kv_a_norm, NORM_EPS), row[:, rank:]), dim=1)
    if weights.q_a is None:
        q, row = batch.adapted(batch.collectives.enter(x), weights.queries, None, changes.qkv), batch.collectives.enter(row)
    else:
        assert weights.q_a_norm is not None
        compressed = kernels.rms_norm(batch.adapted(x, weights.q_a, weights.q_a_bias, changes.q_a), weights.q_a_norm, NORM_EPS)
        entered = batch.collectives.enter(torch.cat((compressed, row), dim=1))
        compressed, row = entered.split([compressed.shape[1], row.shape[1]], dim=1)
        q = batch.adapted(compressed.contiguous(), weights.queries, None, changes.q_b)
    q = q.view(len(q), heads, nope + rope)
    rotated = torch.cat((q[..., nope:].flatten(1), row[:, rank:]), dim=1)
    rotated = rotated if order is None else rotated.index_select(1, order)
    # The kernels split queries, keys and values; there are no values to split here, and the key takes their place.
    rotated = torch.cat((rotated, rotated[:, -rope:]), dim=1)
    q_rotated, k_rotated, _ = kernels.rope(rotated, positions, cos_sin, (heads, 1, rope), None, None, NORM_EPS)
    absorbed = weights.absorbed(kernels)
    q = torch.cat((_by_head(kernels, q[..., :nope], absorbed.keys), q_rotated), dim=2)
    key = torch.cat((row[:, :rank], k_rotated.squeeze(1)), dim=1)
    if isinstance(context, PagedContext):
        cache = context.caches[layer.index]
        assert isinstance(cache, LatentLayer)
        write_rows(cache, key, context.batch.slots)
        mixed = kernels.latent_attention(q, cache, context.batch, layer.scale, rank)
    else:
        mixed = attend_packed(kernels, layer, q, key.unsqueeze(1), None, context, batch.kv_dtype, rank)
    return _by_head(kernels, mixed, absorbed.values).flatten(1)


def _by_head(kernels: Any, x: Tensor, weight: Any) -> Tensor:
    """Computes ``x[T, Hq, K]`` -> [T, Hq, N] by the matrix of each head, [Hq, N, K] or packed."""
    tokens, heads = x.shape[:2]
    bounds = torch.arange(heads + 1, device=x.device) * tokens
    multiply = kernels.grouped_linear if isinstance(weight, Tensor) else kernels.grouped_linear_packed
    out: Tensor = multiply(x.transpose(0, 1).reshape(heads * tokens, -1), weight, bounds)
    return out.view(heads, tokens, -1).transpose(0, 1)
