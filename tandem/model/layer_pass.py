"""Runs one layer of the decoder over one batch, for the engine, the trainer, gradient checkpointing and pipeline stages."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.kernels.api import Kernels, PackedWeight, gate_of
from tandem.model.attention import AttentionContext, Rotation, attend
from tandem.model.latent_attention import latent_attention
from tandem.model.layer_weights import LayerWeights, Written, with_factors
from tandem.model.linear_attention import linear_attention
from tandem.model.lora import LoraBatch, LoraLayer, LowRank, add_lora
from tandem.model.moe import gated, mixture
from tandem.model.parallel.context_parallel import SharedContext
from tandem.model.parallel.model_parallel import Collectives
from tandem.model.router_balance import RouterBalance
from tandem.model.routing import Replay
from tandem.runtime.collectives.communicator import Communicator


class LayerBatch(NamedTuple):
    """The arguments of every layer of one forward pass. ``linear``: the product for plain or packed weights. ``rotations``: of
    ``attention.rotations``. ``collectives``: applied
    before and after the matrices. ``expert_ranks``: the ranks that the experts are sharded over; ``balance``: the load balancing of
    experts. ``fused_mlp``: a packed MLP may be one call. ``replayed``: the experts that tokens are sent to (``None``: the routers choose)."""

    kernels: Kernels
    linear: Callable[[Tensor, Any, Tensor | None], Tensor]
    rotations: tuple[Rotation, ...]
    context: AttentionContext | SharedContext
    kv_dtype: torch.dtype
    collectives: Collectives
    expert_ranks: Communicator | None
    balance: RouterBalance | None
    router_logits: list[Tensor] | None
    lora: LoraBatch | None
    fused_mlp: bool
    replayed: Replay | None = None

    def adapted(self, x: Tensor, weight: Any, bias: Tensor | None, change: LowRank | None) -> Tensor:
        """Returns the product of ``x[T, K]``, plus the low-rank update of the rows that have an adapter."""
        out = self.linear(x, weight, bias)
        return out if self.lora is None else add_lora(self.kernels, out, x, change, self.lora)


State = tuple[Tensor | None, Tensor]
"""(x, residual), both [T, H], passed from layer to layer. ``x``: the output of the previous layer that is still to be added to the
residual; ``None``: nothing to add."""
LayerFunction = Callable[[Tensor | None, Tensor], tuple[Tensor, Tensor]]
AroundLayer = Callable[[int, LayerFunction, Tensor | None, Tensor], tuple[Tensor, Tensor]]
"""``around(index, layer, x, residual)`` runs ``layer(x, residual)``, possibly with work before and after, or runs it again."""

_UNCHANGED = LoraLayer()


def run_layer(
    batch: LayerBatch, weights: LayerWeights, x: Tensor | None, residual: Tensor, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes (x, residual) -> (x, residual). The norm of the sum is at the start, so that a layer reads only its own parameters. ``rows``
    int64: the rows computed after the attention (``None``: all)."""
    if weights.norms_from_one:
        weights = with_factors(weights)
    # Unpacked at once, because attribute look-ups dominate the decoding time of a small model.
    kernels, linear, rotations, context, kv_dtype, collectives, expert_ranks, balance, router_logits, lora, fused_mlp, replayed = batch
    (
        input_norm, attention, qkv, qkv_bias, output, output_bias, mlp_norm, gate_up, gate_up_bias, down, down_bias, experts,
        summed_output_bias, summed_down_bias, written, activation, _, parallel_blocks, latent, linear_weights,
    ) = weights  # fmt: skip
    enter, before, after = collectives[:3]
    eps, centred, changes = attention.eps, attention.centred_norms, _UNCHANGED if lora is None else lora.stacks.layers[attention.index]
    x, residual = added(kernels, x, residual, input_norm, eps, centred)
    if latent is not None:
        normed = x
        x = latent_attention(batch, attention, latent, x)
    elif linear_weights is not None:
        x = normed = enter(x)
        x = linear_attention(batch, attention, linear_weights, x)
    else:
        x = normed = enter(x)
        x = linear(x, qkv, qkv_bias) if lora is None else batch.adapted(x, qkv, qkv_bias, changes.qkv)
        x = attend(kernels, attention, x, rotations[attention.rotation], context, kv_dtype)
    if rows is not None:
        x, residual = x.index_select(0, rows), residual.index_select(0, rows)
        normed = normed.index_select(0, rows) if parallel_blocks else normed
    x = before(x)
    x = after(linear(x, output, output_bias) if lora is None else batch.adapted(x, output, output_bias, changes.output))
    if summed_output_bias is not None:
        x = x + summed_output_bias
    if written is not None:
        x = to_residual(kernels, x, written[0], eps, centred)
    if parallel_blocks:
        x, residual = normed, x + residual
    else:
        x, residual = added(kernels, x, residual, mlp_norm, eps, centred)
        x = enter(x)
    if experts is not None:
        route = experts.route(kernels) if replayed is None else partial(replayed.route, attention.index, experts.selection)
        route = route if balance is None else partial(balance.route, route, attention.index)
        routed = mixture(kernels, experts, x, router_logits, before, expert_ranks, route)
        if gate_up is not None:
            shared = linear(before(gate_of(kernels, activation)(linear(x, gate_up, None))), down, None)
            routed = routed + gated(kernels, experts, x, shared)
        x = after(routed)
    elif fused_mlp and isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight):
        x = kernels.gated_mlp_packed(x, gate_up, gate_up_bias, down, down_bias, activation)
    else:
        x = linear(x, gate_up, gate_up_bias) if lora is None else batch.adapted(x, gate_up, gate_up_bias, changes.gate_up)
        x = before(gate_of(kernels, activation)(x))
        x = after(linear(x, down, down_bias) if lora is None else batch.adapted(x, down, down_bias, changes.down))
        x = x if summed_down_bias is None else x + summed_down_bias
    return (x if written is None else to_residual(kernels, x, written[1], eps, centred)), residual


def added(kernels: Kernels, x: Tensor | None, residual: Tensor, norm: Tensor | None, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """Returns (what the next matrix reads, the residual stream with ``x`` added): its norm, or the stream itself without one."""
    if norm is not None:
        return (kernels.rms_norm(residual, norm, eps, centred), residual) if x is None else kernels.add_rms_norm(x, residual, norm, eps, centred)
    total = residual if x is None else x + residual
    return total, total


def to_residual(kernels: Kernels, x: Tensor, written: Written, eps: float, centred: bool) -> Tensor:
    """Returns what is added to the residual stream for the output ``x`` of attention or MLP."""
    x = x if written.norm is None else kernels.rms_norm(x, written.norm, eps, centred)
    return x if written.factor == 1.0 else x * written.factor
