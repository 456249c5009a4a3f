"""Changes a packed decoder's weights where they have changed: single elements in their packed places, or single matrices, instead of all of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.api import PackedWeight
from tandem.layout.parameters import SINKS, matrix_name
from tandem.model.decoder import Decoder
from tandem.model.layer import Layer
from tandem.model.quantization.scheme import pack_weight

Changes = Mapping[str, Tensor | None]
"""The tensors that have changed, by Hugging Face name, with the indices (int64) of the flat elements that may have; ``None``: any."""


def changes_elements(decoder: Decoder) -> bool:
    """Returns whether single elements of ``decoder`` are worth changing: on a GPU, to which all others would have to be sent. In host memory a few elements of
    a hundred are on half of all cache lines, and packing a matrix from end to end takes less time than finding them."""
    return decoder.device.type != "cpu"


@torch.no_grad()
def load_changes(decoder: Decoder, tensors: Mapping[str, Tensor], changes: Changes) -> bool:
    """Makes a packed ``decoder``, which holds ``tensors`` as they were before ``changes``, hold them as they are, with the bits of ``load_tensors`` and
    ``pack``. Returns ``False``, and changes nothing, for one that is a shard, of transformers, has experts, latent or linear attention, an adapter or a
    value head, or is not packed. Whatever is raised in the middle, such as ``MemoryError``, leaves it unpacked: it has no complete set of weights, and
    computes with none of them before it is given all."""
    shapes = decoder.shapes
    is_plain = shapes.lora is None and shapes.experts is None and shapes.latent is None and shapes.value_head == "none"
    is_plain = is_plain and shapes.linear_attention is None and shapes.transformers is None
    if not (is_plain and decoder.is_packed and decoder.shard_spec.size == 1):
        return False
    try:
        _load(decoder, tensors, changes)
    except BaseException:
        decoder.unpack()
        raise
    return True


def _load(decoder: Decoder, tensors: Mapping[str, Tensor], changes: Changes) -> None:
    plain = dict(_plain_parameters(decoder))
    for name in changes.keys() & plain.keys():
        _put(plain[name], tensors[name], changes[name])
    replaced = {}
    for index, layer in zip(decoder.layer_numbers, decoder.layers, strict=True):
        for place, stacked in enumerate(_layer(layer).stacks()):
            names = [f"{matrix_name(index, module)}.weight" for module in stacked]
            packed = _repacked(decoder, decoder.matrix(index, place), names, tensors, changes, decoder.quantization)
            if packed is not None:
                replaced[index, place] = packed
    names = ["model.embed_tokens.weight" if decoder.lm_head is None else "lm_head.weight"]
    decoder.replace_packed(replaced, _repacked(decoder, decoder.packed_head, names, tensors, changes, decoder.head_quantization))


def _layer(module: object) -> Layer:
    assert isinstance(module, Layer)
    return module


def _plain_parameters(decoder: Decoder) -> list[tuple[str, Tensor]]:
    """Returns the parameters that a packed decoder has as they are: the embedding, norms and biases."""
    found: list[tuple[str, Tensor]] = [("model.embed_tokens.weight", decoder.embed_tokens), ("model.norm.weight", decoder.norm.weight)]
    shapes = decoder.local
    rows = ((shapes.query_rows, shapes.key_value_size, shapes.key_value_size), None, (shapes.intermediate_size,) * 2, None)
    for index, module in zip(decoder.layer_numbers, decoder.layers, strict=True):
        layer, at = _layer(module), f"model.layers.{index}."
        found += [(f"{at}{name}.weight", weight) for name, weight in layer.norms().items()]
        if layer.q_norm is not None and layer.k_norm is not None:
            found += [(f"{at}self_attn.q_norm.weight", layer.q_norm.weight), (f"{at}self_attn.k_norm.weight", layer.k_norm.weight)]
        if layer.sinks is not None:
            found.append((f"{at}{SINKS}", layer.sinks))
        for linear, stacked, of_each in zip(layer.linears(), layer.stacks(), rows, strict=False):
            if linear.bias is not None:
                parts = linear.bias.detach().split(of_each or (linear.rows,))
                found += [(f"{matrix_name(index, name)}.bias", part) for name, part in zip(stacked, parts, strict=True)]
    return found


def _put(parameter: Tensor, tensor: Tensor, where: Tensor | None) -> None:
    if where is None or not parameter.is_contiguous():
        parameter.copy_(tensor)
    else:
        where = where.to(parameter.device)
        parameter.view(-1)[where] = tensor.view(-1)[where.to(tensor.device)].to(parameter)


def _repacked(decoder: Decoder, packed: Any, names: list[str], tensors: Mapping[str, Tensor], changes: Changes, scheme: Any) -> Any:
    """Changes the elements of ``packed``, which stacks the rows of ``names``; returns it packed anew where that cannot be, ``None`` where nothing is left to
    do."""
    changed = [name for name in names if name in changes]
    if not changed:
        return None
    if isinstance(packed, PackedWeight) and scheme is None and _put_elements(decoder, packed, names, tensors, changes):
        return None
    plain = torch.cat([tensors[name] for name in names]) if len(names) > 1 else tensors[names[0]]
    return pack_weight(decoder.kernels, plain.to(decoder.embed_tokens), scheme)


def _put_elements(decoder: Decoder, packed: PackedWeight, names: list[str], tensors: Mapping[str, Tensor], changes: Changes) -> bool:
    positions, values, first = list[Tensor](), list[Tensor](), 0
    for name in names:
        where = changes.get(name, torch.empty(0, dtype=torch.int64))
        if where is None:
            return False
        positions.append(where + first * packed.columns)
        values.append(tensors[name].reshape(-1)[where])
        first += len(tensors[name])
    like = decoder.embed_tokens
    where = torch.cat(positions).to(like.device)
    return decoder.kernels.pack_elements(packed, where // packed.columns, where % packed.columns, torch.cat(values).to(like))
