"""A plain decoder's layers in the form in which kernels compute equal beginnings of sequences once in training (``kernels.trained_layers``)."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from tandem.kernels.trained_layers import TrainedLayer, TrainedNorm, TrainedProduct
from tandem.model.layer_weights import LayerWeights


def trained_layers(layers: Iterable[LayerWeights], tables: Sequence[Tensor]) -> list[TrainedLayer] | None:
    """Returns ``layers``, whose ``tables`` are ``model.rotary.rotary_tables``; ``None`` if one has something that the form cannot say."""
    made = [_trained_layer(weights, tables) for weights in layers]
    known = [layer for layer in made if layer is not None]
    return known if known and len(known) == len(made) else None


def _trained_layer(weights: LayerWeights, tables: Sequence[Tensor]) -> TrainedLayer | None:
    attention = weights.attention
    has_other_blocks = weights.experts is not None or weights.latent is not None or weights.linear_attention is not None or weights.parallel_blocks
    has_other_outputs = weights.written is not None or weights.summed_output_bias is not None or weights.summed_down_bias is not None
    has_other_attention = attention.norms_apart or attention.gated or attention.sinks is not None
    if has_other_blocks or has_other_outputs or has_other_attention or weights.norms_from_one or weights.input_norm is None or weights.mlp_norm is None:
        return None
    eps, centred = attention.eps, attention.centred_norms
    return TrainedLayer(
        attention.heads, TrainedNorm(weights.input_norm, eps, centred), TrainedProduct(weights.qkv, weights.qkv_bias), attention.q_norm, attention.k_norm, eps,
        tables[attention.rotation], attention.scale, attention.window, attention.cap, TrainedProduct(weights.output, weights.output_bias),
        TrainedNorm(weights.mlp_norm, eps, centred), TrainedProduct(weights.gate_up, weights.gate_up_bias), weights.activation,
        TrainedProduct(weights.down, weights.down_bias),
    )  # fmt: skip
