"""The matrices of a mixture's experts in a quantized folder, each under a name of its own."""

from collections.abc import Mapping
from typing import NamedTuple

from tandem.kernels.quantized import QuantizedWeight
from tandem.model.decoder import Decoder
from tandem.model.quantization.scheme import Scheme, pack_stored_groups, round_to_nearest
from tandem.types import UserError


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
