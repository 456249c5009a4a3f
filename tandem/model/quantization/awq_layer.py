"""Scales the inputs of a layer's matrices for AWQ, and folds the inverse into what computes them (Lin et al., 2023, section 3.2)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.layer import Layer
from tandem.model.quantization.awq import clip, fold_into_norm, sampled, search_scales
from tandem.model.quantization.calibration import Chunk, inputs_of, mlp_inputs_of, routed_inputs
from tandem.model.quantization.experts import FEWEST_TOKENS
from tandem.model.quantization.scheme import Scheme


def scale_layer(decoder: Decoder, index: int, chunks: Sequence[Chunk], scheme: Scheme, dtype: torch.dtype) -> None:
    """Searches the scales of the inputs of each matrix and folds their inverse into the operation that computes the inputs: a norm, the rows of v (in latent
    attention of ``kv_b_proj``), or those of up. All matrices that read a norm share its scales, experts too; one that stays plain, as a router, is multiplied
    with them. ``dtype``: of the norms in the folder.

    With fewer key-value heads than query heads a row of v produces several inputs, so o_proj is not scaled. The heads of linear attention share a norm before
    it, and so the scales."""
    layer, shapes = decoder._layers()[index], decoder.shapes
    sample = lambda weight: sampled_inputs(chunks, lambda chunk: inputs_of(decoder, index, weight, chunk))
    attention, beside = _attention_matrices(layer)
    mlp, routers = _mlp_matrices(layer)
    both = shapes.parallel_blocks
    norms, into_attention = layer.norms(), sample(attention[0])
    _scale_normed(norms["input_layernorm"], (*attention, *(mlp if both else ())), (*beside, *(routers if both else ())), into_attention, shapes, scheme, dtype)
    if layer.latent is not None:
        _scale_latent_output(layer, shapes, sample(_weight(layer.o_proj)), scheme)
    if layer.linear_attention is not None:
        output, norm, heads = _weight(layer.o_proj), layer.linear_attention.norm, layer.linear_attention.sizes.num_value_heads
        output.data.mul_(fold_into_norm(norm, search_scales(output, sample(output), scheme, heads=heads), False, dtype).repeat(heads))
    if layer.latent is not None and layer.latent.q_a_norm is not None and layer.latent.q_b_proj is not None:
        second = _weight(layer.latent.q_b_proj)
        second.mul_(fold_into_norm(layer.latent.q_a_norm, search_scales(second, sample(second), scheme), False, dtype))
    elif layer.qkv_proj is not None and shapes.num_attention_heads == shapes.num_key_value_heads:
        output = _weight(layer.o_proj)
        _scale_rows(_weight(layer.qkv_proj), layer.qkv_proj.bias, output, search_scales(output, sample(output), scheme))
    if not both:
        norm = norms["pre_feedforward_layernorm" if shapes.post_norms else "post_attention_layernorm"]
        _scale_normed(norm, mlp, routers, sampled_inputs(chunks, lambda chunk: mlp_inputs_of(decoder, index, chunk)), shapes, scheme, dtype)
    if not scales_up(shapes):
        return
    if layer.gate_up_proj is not None and layer.down_proj is not None:
        down = _weight(layer.down_proj)
        _scale_rows(_weight(layer.gate_up_proj), layer.gate_up_proj.bias, down, search_scales(down, sample(down), scheme))
    if layer.experts is not None:
        assert layer.experts.gate_up_proj is not None and layer.experts.down_proj is not None
        biases = layer.experts.gate_up_bias
        for expert, x in enumerate(expert_samples(decoder, index, chunks)[1]):
            if len(x) >= FEWEST_TOKENS:
                down = layer.experts.down_proj[expert]
                _scale_rows(layer.experts.gate_up_proj[expert], None if biases is None else biases[expert], down, search_scales(down, x, scheme))


def _scale_latent_output(layer: Layer, shapes: ModelShapes, x: Tensor, scheme: Scheme) -> None:
    """Scales the inputs ``x`` of the output of latent attention, each of which a row of ``kv_b_proj`` computes for one head. By powers of 2, because that stays
    plain."""
    latent = shapes.latent
    assert layer.latent is not None and latent is not None
    output, before = _weight(layer.o_proj), _weight(layer.latent.kv_b_proj)
    scales = search_scales(output, x, scheme, powers_of_2=True)
    values = before.data.view(-1, latent.qk_nope_head_dim + latent.v_head_dim, latent.kv_lora_rank)[:, latent.qk_nope_head_dim :]
    values.div_(scales.view(-1, latent.v_head_dim, 1))
    output.data.mul_(scales)


def scales_up(shapes: ModelShapes) -> bool:
    """Returns whether what ``down`` reads is proportional to the rows of up, which is not so where the gate adds to them or clamps them."""
    return shapes.activation != "clamped_swiglu"


def clip_experts(decoder: Decoder, index: int, chunks: Sequence[Chunk], scheme: Scheme) -> None:
    """Does ``awq.clip`` for the experts of layer ``index``, each on the tokens that are routed to it if they are not too few."""
    experts = decoder._layers()[index].experts
    if experts is None:
        return
    assert experts.gate_up_proj is not None and experts.down_proj is not None
    for stack, inputs in zip((experts.gate_up_proj, experts.down_proj), expert_samples(decoder, index, chunks), strict=True):
        for weight, x in zip(stack, inputs, strict=True):
            if len(x) >= FEWEST_TOKENS:
                weight.copy_(clip(weight, x, scheme))


def expert_samples(decoder: Decoder, index: int, chunks: Sequence[Chunk]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns a sample of what each expert of layer ``index`` reads, and of what its ``down`` does."""
    of_chunks = [routed_inputs(decoder, index, chunk) for chunk in chunks]
    count = len(of_chunks[0].bounds) - 1
    own = lambda rows, each, expert: rows[each.bounds[expert] : each.bounds[expert + 1]]
    return tuple([sampled(torch.cat([sampled(own(getattr(each, kind), each, expert)) for each in of_chunks])) for expert in range(count)]
                 for kind in ("rows", "inner"))  # type: ignore[return-value]  # fmt: skip


def sampled_inputs(chunks: Sequence[Chunk], inputs: Callable[[Chunk], Tensor]) -> Tensor:
    """Returns some hundred rows of ``inputs``, from every chunk."""
    return sampled(torch.cat([sampled(inputs(chunk)) for chunk in chunks]))


def is_of_queries(module: str) -> bool:
    """Returns whether ``module`` computes queries or keys, which are not clipped, because attention exponentiates their product."""
    return module.rpartition(".")[2] in ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")


def _attention_matrices(layer: Layer) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the matrices that read the norm before attention, and those of them that stay plain."""
    if layer.linear_attention is not None:
        return [_weight(layer.linear_attention.in_proj_qkvz)], [_weight(layer.linear_attention.in_proj_ba)]
    if layer.latent is not None:
        return [_weight(linear) for linear in (layer.latent.q_proj or layer.latent.q_a_proj, layer.latent.kv_a_proj_with_mqa)], []
    return [_weight(layer.qkv_proj)], []


def _mlp_matrices(layer: Layer) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the matrices that read the norm before the MLP, of experts [E, N, K], and those of them that stay plain."""
    own = [] if layer.gate_up_proj is None else [_weight(layer.gate_up_proj)]
    if layer.experts is None:
        return own, []
    assert layer.experts.gate_up_proj is not None
    plain = [layer.experts.router] if layer.experts.shared_gate is None else [layer.experts.router, layer.experts.shared_gate]
    return [*own, layer.experts.gate_up_proj], [weight.data for weight in plain]


def _scale_normed(
    norm: nn.Parameter, matrices: Sequence[Tensor], plain: Sequence[Tensor], x: Tensor, shapes: ModelShapes, scheme: Scheme, dtype: torch.dtype
) -> None:
    """Scales what ``norm`` computes, ``x`` before. Where ``plain`` matrices read it too, by powers of 2, so that these are multiplied without rounding."""
    weight = torch.cat([each.detach().flatten(0, -2) for each in matrices])
    scales = fold_into_norm(norm, search_scales(weight, x, scheme, powers_of_2=bool(plain)), shapes.norms_from_one, dtype)
    for each in (*matrices, *plain):
        each.data.mul_(scales)


def _scale_rows(before: Tensor, bias: Tensor | None, after: Tensor, scales: Tensor) -> None:
    """Divides the last rows of ``before``, which compute the inputs of ``after``, by ``scales``."""
    before.data[-len(scales) :].div_(scales.unsqueeze(1))
    if bias is not None:
        bias.data[-len(scales) :].div_(scales)
    after.data.mul_(scales)


def _weight(linear: "nn.Module | None") -> Tensor:
    weight = None if linear is None else linear.weight
    assert isinstance(weight, Tensor)
    return weight
