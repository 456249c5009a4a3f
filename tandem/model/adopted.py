"""A decoder that computes with prepared weights in memory that is not its own: the published ones of a pod (``Decoder.adopt``)."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.api import Kernels, PackedWeight
from tandem.kernels.reference import ReferenceKernels
from tandem.layout.panels import is_stackable
from tandem.layout.shapes import matrix_name, published_parameters
from tandem.model.decoder import Decoder
from tandem.model.layer import STACKED
from tandem.types import RunError
from tandem.types.weights import Layout


class SharedTensors(NamedTuple):
    """Weights by Hugging Face name, in the decoder's dtype. Those ``in_panels`` are flat and in the layout of ``tandem.layout.panels``, the others in rows."""

    tensors: Mapping[str, Tensor]
    in_panels: Collection[str]


def packed_layout(kernels: Kernels) -> Layout | None:
    """Returns the layout of the matrices that ``kernels`` multiply with, if it is one that weights are published in."""
    # Imported here, because other kernels work where these cannot be built.
    from tandem.kernels.cpu.kernels import CpuKernels

    if isinstance(kernels, CpuKernels):
        return "panels"
    return "rows" if type(kernels) is ReferenceKernels else None


def adoptable_layout(decoder: Decoder) -> Layout | None:
    """Returns the layout of published matrices that ``decoder`` can compute with where they are; ``None`` if there is none: it is on a GPU, a shard, or has
    experts, an adapter, a value head or quantized weights, or its kernels round the weights."""
    shapes = decoder.shapes
    is_plain = shapes.experts is None and shapes.lora is None and shapes.value_head == "none" and decoder.quantization is None
    return packed_layout(decoder.kernels) if is_plain and decoder.group is None and decoder.device.type == "cpu" else None


def adopt(decoder: Decoder, shared: SharedTensors) -> None:
    """Lets ``decoder`` compute with ``shared`` weights where they are. A matrix that is not there as the decoder's kernels need it is packed to memory of the
    decoder's own. Raises ``RunError`` before anything has changed if a tensor is missing or has another size than the decoder's."""
    tensors, shapes = shared.tensors, decoder.shapes
    known = dict(published_parameters(shapes))
    _check(known, shared, decoder.dtype)
    own = {"norm.weight": tensors["model.norm.weight"]}
    matrices = []
    for index in range(shapes.num_hidden_layers):
        packed = []
        for module, stacked in zip(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), STACKED, strict=True):
            names = [matrix_name(index, each) for each in stacked]
            packed.append(_packed(decoder, shared, known, [f"{name}.weight" for name in names]))
            if f"{names[0]}.bias" in tensors:
                own[f"layers.{index}.{module}.bias"] = _as_one([tensors[f"{name}.bias"] for name in names])
        matrices.append(tuple(packed))
        at = f"model.layers.{index}."
        own |= {f"layers.{index}.{norm}.weight": tensors[f"{at}{norm}.weight"] for norm in ("input_layernorm", "post_attention_layernorm")}
        if shapes.qk_norm:
            own |= {f"layers.{index}.{norm}.weight": tensors[f"{at}self_attn.{norm}.weight"] for norm in ("q_norm", "k_norm")}
    head = _packed(decoder, shared, known, ["model.embed_tokens.weight" if shapes.tie_word_embeddings else "lm_head.weight"])
    is_packed = "model.embed_tokens.weight" in shared.in_panels
    if not is_packed:
        own["embed_tokens"] = tensors["model.embed_tokens.weight"]
    decoder.adopt(own, matrices, head if is_packed else None, head)


def _check(known: Mapping[str, tuple[int, ...]], shared: SharedTensors, dtype: torch.dtype) -> None:
    for name, shape in known.items():
        tensor = shared.tensors.get(name)
        expected = (math.prod(shape),) if name in shared.in_panels else shape
        if tensor is None or tuple(tensor.shape) != expected or tensor.dtype != dtype:
            raise RunError(f"the published weights do not have '{name}' in the shape of the engine's model")


def _packed(decoder: Decoder, shared: SharedTensors, known: Mapping[str, tuple[int, ...]], names: Sequence[str]) -> PackedWeight:
    """Returns the stack of the matrices ``names``, of the shapes ``known``, packed: where they are, if they are in the layout of the decoder's kernels."""
    own = [known[name] for name in names]
    if all(name in shared.in_panels for name in names) and is_stackable(own):
        return PackedWeight(_as_one([shared.tensors[name] for name in names]), sum(shape[0] for shape in own), own[0][1])
    if any(name in shared.in_panels for name in names):
        raise RunError(f"the published weights have '{names[0]}' in panels that do not stack to the engine's matrix")
    tensors = [shared.tensors[name] for name in names]
    if packed_layout(decoder.kernels) == "rows":
        rows, columns = sum(shape[0] for shape in own), own[0][1]
        return PackedWeight(_as_one([tensor.view(-1) for tensor in tensors]).view(rows, columns), rows, columns)
    return decoder.kernels.pack(torch.cat(tensors))


def _as_one(tensors: Sequence[Tensor]) -> Tensor:
    """Returns flat tensors as one: a view if they lie one behind the other in the same memory, which those of a stack do."""
    first, ends = tensors[0], [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
    is_one = {tensor.untyped_storage().data_ptr() for tensor in tensors} == {first.untyped_storage().data_ptr()}
    if is_one and [tensor.data_ptr() for tensor in tensors[1:]] == ends[:-1]:
        return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))
    return torch.cat([*tensors])
