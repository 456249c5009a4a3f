"""The parameters of one layer of the decoder."""

import torch
from torch import Tensor, nn

from tandem.layout.linear_attention import OUTPUT, PROJECTIONS
from tandem.layout.shapes import ModelShapes
from tandem.layout.sharding import WHOLE, ShardSpec, local_shapes
from tandem.model.latent_projections import LatentProjections
from tandem.model.linear import Linear
from tandem.model.linear_attention_weights import LinearAttentionProjections
from tandem.model.moe import Experts

STACKED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""The matrices that each of ``Layer.linears`` stacks, but those of latent attention (see ``stacks_of``)."""


def stacks_of(latent: tuple[str, ...], has_mlp: bool, is_linear: bool = False) -> tuple[tuple[str, ...], ...]:
    """Returns the matrices that each linear layer stacks, in a layer with latent attention those of its own, ``latent``; ``has_mlp``: it has an MLP or shared
    experts. ``is_linear``: it has linear attention."""
    if is_linear:
        return (*((name,) for name in (*PROJECTIONS, OUTPUT)), *(STACKED[2:] if has_mlp else ()))
    attention = tuple((name,) for name in latent) or STACKED[:1]
    return (*attention, *(STACKED[1:] if has_mlp else STACKED[1:2]))


def factor_of_norm(weight: Tensor, from_one: bool) -> Tensor:
    """Returns what a norm with ``weight[H]`` multiplies with: the weight, or 1 plus it in at least fp32, which transformers too does not round to 16 bits."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + 1.0 if from_one else weight


class Norm(nn.Module):
    """The ``weight[H]`` of a norm, or ``[G, H]`` of one for each head."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


class Layer(nn.Module):
    """The parameters of one layer. ``qkv_proj`` stacks the rows of q, k and v, ``gate_up_proj`` those of gate and up; ``latent`` replaces the first in a model
    with latent attention, ``linear_attention`` in a layer with linear attention, where ``o_proj`` is that of its output.
    A layer has these and ``down_proj``, or ``experts``, with those of the shared experts if there are any; of the norms, those of
    ``ModelShapes.layer_norms``."""

    input_layernorm: Norm | None
    post_attention_layernorm: Norm | None
    pre_feedforward_layernorm: Norm | None
    post_feedforward_layernorm: Norm | None
    qkv_proj: Linear | None
    latent: LatentProjections | None
    linear_attention: LinearAttentionProjections | None
    gate_up_proj: Linear | None
    down_proj: Linear | None
    experts: Experts | None

    def __init__(self, whole: ModelShapes, index: int, dtype: torch.dtype, device: torch.device, shard_spec: ShardSpec = WHOLE) -> None:
        super().__init__()
        shapes = local_shapes(whole, shard_spec)
        hidden, inner = shapes.hidden_size, shapes.intermediate_size
        # A matrix sharded by output columns (see ``ShardSpec``) needs no sum over ranks.
        rows, of = (hidden // shard_spec.size, whole) if shard_spec.deterministic else (hidden, shapes)
        norm = lambda name: Norm((hidden,), dtype, device) if name in shapes.layer_norms else None
        self.input_layernorm = norm("input_layernorm")
        linear = whole.linear_attention_of(index)
        has_own = shapes.latent is None and linear is None
        self.linear_attention = None if linear is None else LinearAttentionProjections(linear, hidden, dtype, device, shard_spec.rank, shard_spec.size)
        self.qkv_proj = Linear(shapes.qkv_rows, hidden, shapes.attention_bias, dtype, device) if has_own else None
        self.latent = None if shapes.latent is None else LatentProjections(shapes.latent, shapes, dtype, device)
        q_norm, k_norm = (shapes.qk_norm_shapes if linear is None else ()) or ((), ())
        self.q_norm = Norm(q_norm, dtype, device) if q_norm else None
        self.k_norm = Norm(k_norm, dtype, device) if k_norm else None
        self.sinks = nn.Parameter(torch.empty(shapes.num_attention_heads, dtype=dtype, device=device)) if shapes.attention_sinks else None
        own_linear = of.linear_attention_of(index)
        attended, output_bias = (of.attended_size, shapes.output_bias) if own_linear is None else (own_linear.value_size, False)
        self.o_proj = Linear(rows, attended, output_bias, dtype, device)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        experts, whole_experts = shapes.experts_of(index), of.experts_of(index)
        self.experts = self.gate_up_proj = self.down_proj = None
        if experts is not None and whole_experts is not None:
            down = (rows, whole_experts.intermediate_size)
            adds_bias = shard_spec.deterministic or shard_spec.rank == 0
            self.experts = Experts(experts, hidden, dtype, device, down, experts.num_experts // shard_spec.expert_size, shapes.activation, adds_bias)
            if experts.shared_intermediate_size:
                self.gate_up_proj = Linear(2 * experts.shared_intermediate_size, hidden, False, dtype, device)
                self.down_proj = Linear(rows, whole_experts.shared_intermediate_size, False, dtype, device)
        else:
            self.gate_up_proj = Linear(2 * inner, hidden, shapes.mlp_bias, dtype, device)
            self.down_proj = Linear(rows, of.intermediate_size, shapes.mlp_bias, dtype, device)
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        if shapes.lora is not None:
            attention = (shapes.query_rows, shapes.key_value_size, shapes.key_value_size)
            other = self.linear_attention or self.latent
            into = (attention,) if other is None else ((linear.rows,) for linear in other.linears())
            for matrix, stacked, own in zip(self.linears(), self.stacks(), (*into, (rows,), (inner, inner), (rows,)), strict=False):
                matrix.adapt(own, [shapes.adapter_rank(module) for module in stacked], shapes.lora.scale)

    def norms(self) -> dict[str, nn.Parameter]:
        """Returns the weights of its norms of the residual stream, and of what is added to it, by name."""
        each = {
            "input_layernorm": self.input_layernorm, "post_attention_layernorm": self.post_attention_layernorm,
            "pre_feedforward_layernorm": self.pre_feedforward_layernorm, "post_feedforward_layernorm": self.post_feedforward_layernorm,
        }  # fmt: skip
        return {name: norm.weight for name, norm in each.items() if norm is not None}

    def linears(self) -> tuple[Linear, ...]:
        """Returns its linear layers in the order of the forward pass; a mixture of experts is not one."""
        other = self.linear_attention or self.latent
        into = (self.qkv_proj,) if other is None else other.linears()
        each = (*into, self.o_proj, self.gate_up_proj, self.down_proj)
        return tuple(linear for linear in each if linear is not None)

    def is_by_head(self, linear: Linear) -> bool:
        """Returns whether ``linear`` is the matrix of latent attention that is multiplied head by head."""
        return self.latent is not None and linear is self.latent.kv_b_proj

    def stacks(self) -> tuple[tuple[str, ...], ...]:
        """Returns the matrices that each of ``linears`` stacks."""
        return stacks_of(() if self.latent is None else self.latent.names, self.gate_up_proj is not None, self.linear_attention is not None)
