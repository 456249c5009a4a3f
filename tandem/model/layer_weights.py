"""A layer's weights in the form that the forward pass uses."""

from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from tandem.layout.shapes import Activation, ModelShapes
from tandem.layout.sharding import ShardSpec
from tandem.model.attention import AttentionLayer
from tandem.model.latent_projections import LatentWeights
from tandem.model.layer import Layer, factor_of_norm
from tandem.model.linear_attention_weights import LinearAttentionWeights
from tandem.model.moe import ExpertLayer


class Written(NamedTuple):
    """What happens to the output of attention or MLP before it is added to the residual stream: a norm, if there is one, then a factor."""

    norm: Tensor | None
    factor: float


class LayerWeights(NamedTuple):
    """One layer's plain tensors or packed weights, without modules, so that nothing is looked up. ``summed_output_bias`` and
    ``summed_down_bias`` replace the other two if they are added after the sum over ranks. ``input_norm`` and ``mlp_norm``: ``None`` where attention and MLP
    read the residual stream as it is. ``written``: of attention and MLP, ``None`` where their outputs are added as they are. ``activation``: of the MLP's gate.
    ``norms_from_one``: norms multiply with 1 plus the weights here (see ``with_factors``). ``parallel_blocks``: the MLP reads what attention does.
    ``latent``, ``linear_attention``: in the place of ``qkv``, which is ``None`` then."""

    input_norm: Tensor | None
    attention: AttentionLayer
    qkv: Any
    qkv_bias: Tensor | None
    output: Any
    output_bias: Tensor | None
    mlp_norm: Tensor | None
    gate_up: Any
    gate_up_bias: Tensor | None
    down: Any
    down_bias: Tensor | None
    experts: ExpertLayer | None
    summed_output_bias: Tensor | None = None
    summed_down_bias: Tensor | None = None
    written: tuple[Written, Written] | None = None
    activation: Activation = "silu"
    norms_from_one: bool = False
    parallel_blocks: bool = False
    latent: LatentWeights | None = None
    linear_attention: LinearAttentionWeights | None = None


def layer_weights(
    layer: Layer, index: int, matrices: tuple[Any, ...], experts: ExpertLayer | None, shapes: ModelShapes, shard_spec: ShardSpec, trains: bool
) -> LayerWeights:
    """Returns layer ``index`` with its ``matrices``, plain or packed, in the order of ``Layer.linears``. ``shapes``: of the rank's shard,
    which is described by ``shard_spec``; ``trains``: together with other ranks."""
    # Partial products are summed over the ranks and a bias must be added once: by the first rank, or in training by all ranks after the
    # sum, so that all have its gradient at the same time.
    is_summed = not shard_spec.deterministic and shard_spec.size > 1
    late = is_summed and trains
    biased = not is_summed or (not late and shard_spec.rank == 0)
    q_norm = layer.q_norm.weight if layer.q_norm is not None else None
    k_norm = layer.k_norm.weight if layer.k_norm is not None else None
    heads = shapes.num_attention_heads, shapes.num_key_value_heads, shapes.head_dim
    norms, factor, written = layer.norms(), shapes.multipliers.residual, None
    mlp_norm = norms.get("pre_feedforward_layernorm" if shapes.post_norms else "post_attention_layernorm")
    if shapes.post_norms:
        written = Written(norms["post_attention_layernorm"], factor), Written(norms["post_feedforward_layernorm"], factor)
    elif factor != 1.0:
        written = Written(None, factor), Written(None, factor)
    latent = linear = None
    if layer.linear_attention is not None:
        linear, matrices = layer.linear_attention.weights(*matrices[:2]), (None, *matrices[2:])
    if layer.latent is not None and shapes.latent is not None:
        # A single entry takes the place of queries, keys and values in what follows.
        own = len(layer.latent.names)
        latent, matrices = layer.latent.weights(shapes.latent, shapes.num_attention_heads, matrices[:own]), (None, *matrices[own:])
    qkv, output, gate_up, down = (*matrices, None, None)[:4]
    return LayerWeights(
        norms.get("input_layernorm"),
        AttentionLayer(
            index, heads, shapes.attention_scale, shapes.window(index), q_norm, k_norm, shapes.rms_norm_eps, shapes.qk_norm_all_heads or shapes.qk_norm_by_head,
            shapes.rotary_of(index), shapes.score_cap, layer.sinks, shapes.centred_norms, shapes.attention_gate,
        ),
        qkv,
        None if layer.qkv_proj is None else layer.qkv_proj.bias,
        output,
        layer.o_proj.bias if biased else None,
        mlp_norm,
        gate_up,
        layer.gate_up_proj.bias if layer.gate_up_proj is not None else None,
        down,
        layer.down_proj.bias if layer.down_proj is not None and biased else None,
        experts,
        layer.o_proj.bias if late else None,
        layer.down_proj.bias if layer.down_proj is not None and late else None,
        written,
        shapes.activation,
        shapes.norms_from_one,
        shapes.parallel_blocks,
        latent,
        linear,
    )


def with_factors(weights: LayerWeights) -> LayerWeights:
    """Returns ``weights`` with the factors of norms in the place of the weights that they are 1 more than. A layer that trains does this while it runs,
    because only then are its weights sure to be there; an engine once."""
    if not weights.norms_from_one:
        return weights
    attention, written = weights.attention, weights.written
    return weights._replace(
        input_norm=_factor(weights.input_norm),
        attention=replace(attention, q_norm=_factor(attention.q_norm), k_norm=_factor(attention.k_norm)),
        mlp_norm=_factor(weights.mlp_norm),
        written=None if written is None else (written[0]._replace(norm=_factor(written[0].norm)), written[1]._replace(norm=_factor(written[1].norm))),
        norms_from_one=False,
    )


def _factor(norm: Tensor | None) -> Tensor | None:
    return None if norm is None else factor_of_norm(norm, True)
