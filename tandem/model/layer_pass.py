"""One layer of the decoder over one batch: what the engine, a trainer, gradient checkpointing and a pipeline stage all run."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.kernels.api import Kernels, PackedWeight
from tandem.model.attention import AttentionContext, AttentionLayer, attend
from tandem.model.context_parallel import SharedContext
from tandem.model.lora import LoraBatch, LoraLayer, LowRank, add_lora
from tandem.model.moe import ExpertLayer, mixture
from tandem.model.parallel import Collectives
from tandem.model.router_balance import RouterBalance
from tandem.runtime.communicator import Communicator


class LayerWeights(NamedTuple):
    """One layer as the forward pass runs it: plain tensors or packed weights, and no module to look anything up in.
    ``summed_output_bias`` and ``summed_down_bias``: in place of the other two where they are added after ranks have summed."""

    input_norm: Tensor
    attention: AttentionLayer
    qkv: Any
    qkv_bias: Tensor | None
    output: Any
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Any
    gate_up_bias: Tensor | None
    down: Any
    down_bias: Tensor | None
    experts: ExpertLayer | None
    summed_output_bias: Tensor | None = None
    summed_down_bias: Tensor | None = None


class LayerBatch(NamedTuple):
    """What every layer of one forward pass is given. ``linear``: the product for plain or for packed weights. ``collectives``
    stand around the matrices. ``expert_ranks``: those that experts are divided between; ``balance``: what keeps experts evenly busy.
    ``fused_mlp``: a packed MLP may be one call."""

    kernels: Kernels
    linear: Callable[[Tensor, Any, Tensor | None], Tensor]
    positions: Tensor
    cos_sin: Tensor
    context: AttentionContext | SharedContext
    kv_dtype: torch.dtype
    collectives: Collectives
    expert_ranks: Communicator | None
    balance: RouterBalance | None
    router_logits: list[Tensor] | None
    lora: LoraBatch | None
    fused_mlp: bool


State = tuple[Tensor | None, Tensor]
"""(x, residual), both [T, H]: what a layer passes on. ``x`` is what the layer before returned and has not added to the residual
yet; ``None``: nothing is to be added."""
LayerFunction = Callable[[Tensor | None, Tensor], tuple[Tensor, Tensor]]
AroundLayer = Callable[[int, LayerFunction, Tensor | None, Tensor], tuple[Tensor, Tensor]]
"""``around(index, layer, x, residual)`` runs ``layer(x, residual)`` and may do things before and after, or run it again."""

_UNCHANGED = LoraLayer()


def run_layer(
    batch: LayerBatch, weights: LayerWeights, x: Tensor | None, residual: Tensor, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(x, residual) -> (x, residual). The norm of the sum stands at the start, so that a layer reads its own parameters only.
    ``rows`` int64: the only ones that are asked for after the attention (``None``: all)."""
    kernels, attention, lora = batch.kernels, weights.attention, batch.lora
    enter, before, after, *_ = batch.collectives
    changes = _UNCHANGED if lora is None else lora.layers[attention.index]
    if x is None:
        x = kernels.rms_norm(residual, weights.input_norm, attention.eps)
    else:
        x, residual = kernels.add_rms_norm(x, residual, weights.input_norm, attention.eps)
    qkv = _project(batch, enter(x), weights.qkv, weights.qkv_bias, changes.qkv)
    x = attend(kernels, attention, qkv, batch.positions, batch.cos_sin, batch.context, batch.kv_dtype)
    if rows is not None:
        x, residual = x.index_select(0, rows), residual.index_select(0, rows)
    x = after(_project(batch, before(x), weights.output, weights.output_bias, changes.output))
    if weights.summed_output_bias is not None:
        x = x + weights.summed_output_bias
    x, residual = kernels.add_rms_norm(x, residual, weights.mlp_norm, attention.eps)
    x = enter(x)
    if weights.experts is not None:
        route = None if batch.balance is None else partial(batch.balance.route, kernels, attention.index)
        return after(mixture(kernels, weights.experts, x, batch.router_logits, before, batch.expert_ranks, route)), residual
    gate_up, down = weights.gate_up, weights.down
    if batch.fused_mlp and isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight):
        return kernels.gated_mlp_packed(x, gate_up, weights.gate_up_bias, down, weights.down_bias), residual
    x = kernels.silu_mul(_project(batch, x, gate_up, weights.gate_up_bias, changes.gate_up))
    x = after(_project(batch, before(x), down, weights.down_bias, changes.down))
    return (x if weights.summed_down_bias is None else x + weights.summed_down_bias), residual


def _project(batch: LayerBatch, x: Tensor, weight: Any, bias: Tensor | None, change: LowRank | None) -> Tensor:
    out = batch.linear(x, weight, bias)
    return out if batch.lora is None else add_lora(batch.kernels, out, x, change, batch.lora)
