"""The matrices of a mixture's experts in a quantized folder, each under a name of its own."""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from tandem.kernels.quantized import QuantizedWeight, plain_weight
from tandem.model.decoder import Decoder
from tandem.model.quantization.calibration import Chunk, routed_inputs
from tandem.model.quantization.gptq import Hessian, gptq
from tandem.model.quantization.scheme import Scheme, pack_stored_groups, round_to_nearest, split_rows
from tandem.types import UserError

FEWEST_TOKENS = 32
"""Calibration tokens with fewer of which an expert is rounded to nearest: GPTQ would move its errors to inputs that it has not seen."""


class ExpertModules(NamedTuple):
    """The names of one expert's matrices, without ``.weight``."""

    gate: str
    up: str
    down: str


def expert_modules(decoder: Decoder, index: int) -> list[ExpertModules]:
    """Returns the matrices of the experts of layer ``index`` that the decoder holds, which are none in a layer with a plain MLP."""
    experts = decoder._layers()[decoder.layer_numbers.index(index)].experts
    if experts is None:
        return []
    first, names, at = decoder.shard_spec.expert_rank * experts.held, experts.shapes.names, f"model.layers.{index}."
    return [ExpertModules(*(at + name.format(expert) for name in (names.gate, names.up, names.down))) for expert in range(first, first + experts.held)]


def store_experts(decoder: Decoder, read: Mapping[str, QuantizedWeight]) -> None:
    """Packs the experts of every layer: the quantized weights ``read`` by module, or where a layer has none of them its plain parameters. Raises ``UserError``
    for a layer that has both."""
    for index, layer in zip(decoder.layer_numbers, decoder._layers(), strict=True):
        if layer.experts is None:
            continue
        modules = expert_modules(decoder, index)
        plain = [name for each in modules for name in each if name not in read]
        if not plain:
            gate_up = pack_stored_groups(decoder.kernels, [(read[gate], read[up]) for gate, up, _ in modules])
            layer.experts.stored = gate_up, pack_stored_groups(decoder.kernels, [(read[down],) for _, _, down in modules])
        elif len(plain) == 3 * len(modules):
            gate_up, down = layer.experts.gate_up_proj, layer.experts.down_proj
            assert gate_up is not None and down is not None
            layer.experts.stored = decoder.kernels.pack_groups(gate_up), decoder.kernels.pack_groups(down)
        else:
            raise UserError(f"tensor '{plain[0]}.weight' is plain and other experts of its layer are quantized, which is not supported; quantize all or none")


def round_experts(decoder: Decoder, index: int, scheme: Scheme) -> dict[str, QuantizedWeight]:
    """Returns the matrices of the experts of layer ``index`` rounded to nearest, by module."""
    experts, modules = decoder._layers()[decoder.layer_numbers.index(index)].experts, expert_modules(decoder, index)
    if experts is None:
        return {}
    assert experts.gate_up_proj is not None and experts.down_proj is not None
    gate, up = experts.gate_up_proj.detach().chunk(2, dim=1)
    by_kind = zip(modules, gate, up, experts.down_proj.detach(), strict=True)
    return {name: round_to_nearest(weight, scheme) for names, *weights in by_kind for name, weight in zip(names, weights, strict=True)}


@torch.no_grad()
def replace_experts(decoder: Decoder, index: int, weights: Mapping[str, QuantizedWeight]) -> None:
    """Puts the dequantized ``weights`` by module in the places of the plain matrices of the experts of layer ``index``."""
    experts = decoder._layers()[decoder.layer_numbers.index(index)].experts
    if experts is None:
        return
    assert experts.gate_up_proj is not None and experts.down_proj is not None
    for expert, (gate, up, down) in enumerate(expert_modules(decoder, index)):
        experts.gate_up_proj[expert].copy_(torch.cat([plain_weight(weights[gate]), plain_weight(weights[up])]))
        experts.down_proj[expert].copy_(plain_weight(weights[down]))


@torch.no_grad()
def gptq_experts(
    decoder: Decoder, index: int, chunks: Sequence[Chunk], scheme: Scheme, *, damping: float, act_order: bool
) -> tuple[dict[str, QuantizedWeight], list[str]]:
    """Does ``round_experts`` by GPTQ, each expert on the tokens that are routed to it, ``down`` on what its quantized gate and up compute, and puts the
    dequantized matrices in the places of the plain ones. Returns beside it the modules that had too few tokens and were rounded to nearest."""
    experts, modules = decoder._layers()[decoder.layer_numbers.index(index)].experts, expert_modules(decoder, index)
    if experts is None:
        return {}, []
    assert experts.gate_up_proj is not None and experts.down_proj is not None
    weights: dict[str, QuantizedWeight] = {}
    few: list[str] = []
    for kind, stack in enumerate((experts.gate_up_proj, experts.down_proj)):
        hessians = [Hessian(stack.shape[2]) for _ in modules]
        for chunk in chunks:
            routed = routed_inputs(decoder, index, chunk)
            for hessian, (start, end) in zip(hessians, itertools.pairwise(routed.bounds), strict=True):
                hessian.add((routed.rows if kind == 0 else routed.inner)[start:end])
        for names, hessian, weight in zip(modules, hessians, stack, strict=True):
            own = names[:2] if kind == 0 else names[2:]
            if hessian.tokens < FEWEST_TOKENS:
                few += own
                quantized = round_to_nearest(weight, scheme)
            else:
                quantized = gptq(weight, hessian.mean(), scheme, damping=damping, act_order=act_order)
            weight.copy_(plain_weight(quantized))
            weights |= dict(zip(own, split_rows(quantized, [len(weight) // len(own)] * len(own)), strict=True))
    return weights, few
