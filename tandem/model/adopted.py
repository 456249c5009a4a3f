"""A decoder that computes with prepared weights in memory that is not its own: the published ones of a pod (``Decoder.adopt``)."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.kernels.api import Kernels, PackedGroups, PackedWeight
from tandem.kernels.quantized import PackedParts
from tandem.kernels.reference import ReferenceKernels
from tandem.layout.expert_shapes import CHOICE_BIAS, SHARED_GATE, ExpertShapes
from tandem.layout.latent_attention import WITHIN_HEADS
from tandem.layout.linear_attention import PROJECTIONS
from tandem.layout.panels import EMBEDDING, HEAD, Stacks, expert_stacks, is_stackable, panels_of_rows
from tandem.layout.parameters import SINKS, linear_name, published_parameters
from tandem.layout.shapes import ModelShapes
from tandem.layout.sharding import ShardSpec, shard_slices
from tandem.model.decoder import Decoder
from tandem.model.latent_projections import pack_absorbed
from tandem.model.layer import stacks_of
from tandem.model.linear_attention_weights import VECTORS
from tandem.model.moe import ExpertBiases, ExpertLayer, wide
from tandem.model.routing import Selection
from tandem.types import RunError
from tandem.types.weights import Layout


class SharedTensors(NamedTuple):
    """Weights by Hugging Face name, in the decoder's dtype. Those ``in_panels`` are flat, whole and in the layout of ``tandem.layout.panels``, the others in
    rows, and for a shard its part of them."""

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
    """Returns the layout of published matrices that ``decoder`` can compute with where they are; ``None`` if there is none: it is on a GPU, a module
    of transformers, has an adapter, a value head or quantized weights, its kernels round the weights, or it is a shard whose kernels may give a stack other
    bits than its parts."""
    shapes = decoder.shapes
    is_plain = shapes.lora is None and shapes.value_head == "none" and decoder.quantization is None and shapes.transformers is None
    layout = packed_layout(decoder.kernels) if is_plain and decoder.device.type == "cpu" else None
    return None if layout == "rows" and decoder.group is not None else layout


def adopt(decoder: Decoder, shared: SharedTensors) -> None:
    """Lets ``decoder`` compute with ``shared`` weights where they are. A matrix that is not there as the decoder's kernels need it is packed to memory of the
    decoder's own. Raises ``RunError`` before anything has changed if a tensor is missing or has another size than the decoder's."""
    matrices, tensors, shapes = _Matrices(decoder, shared), shared.tensors, decoder.shapes
    own, layers, mixtures = {"norm.weight": tensors["model.norm.weight"]}, list[tuple[Any, ...]](), list[ExpertLayer | None]()
    for index in range(shapes.num_hidden_layers):
        at, experts, packed = f"model.layers.{index}.", shapes.experts_of(index), []
        has_mlp = experts is None or experts.shared_intermediate_size > 0
        latent = () if shapes.latent is None else tuple(matrix.name for matrix in shapes.attention_matrices[:-1])
        linear = shapes.linear_attention_of(index)
        own_modules = tuple(f"latent.{name}" for name in latent) or ("qkv_proj",)
        own_modules = own_modules if linear is None else tuple(f"linear_attention.{name}" for name in PROJECTIONS)
        modules = (*own_modules, "o_proj", *(("gate_up_proj", "down_proj") if has_mlp else ()))
        for module, stacked in zip(modules, stacks_of(latent, has_mlp, linear is not None), strict=True):
            names = [linear_name(shapes, index, each) for each in stacked]
            if stacked == (WITHIN_HEADS,) and shapes.latent is not None:
                packed.append(pack_absorbed(decoder.kernels, shapes.latent, matrices.in_whole_rows(f"{names[0]}.weight")))
                continue
            packed.append(matrices.stack([f"{name}.weight" for name in names]))
            if f"{names[0]}.bias" in tensors:
                own[f"layers.{index}.{module}.bias"] = _as_one([tensors[f"{name}.bias"] for name in names])
        layers.append(tuple(packed))
        mixture = None
        if experts is not None:
            router = f"{at}{experts.names.router}.weight"
            gate_up, down = (matrices.groups(stacks) for stacks in expert_stacks(matrices.known.keys(), at, experts.names))
            shared_gate = matrices.stack([f"{at}{SHARED_GATE}"]) if experts.shared_gate else None
            selection = None if experts.sigmoid is None else Selection(experts.sigmoid, tensors[f"{at}{CHOICE_BIAS}"])
            selection = selection if experts.softmax is None else Selection(experts.softmax, None)
            is_wide = selection is None or decoder.dtype == torch.float32
            multiplied = matrices.stack([router]) if is_wide else decoder.kernels.pack(wide(matrices.in_rows(router)))
            each, normalised = experts.num_experts_per_tok, experts.normalised
            biases = _biases(experts, at, tensors) if experts.biased else None
            mixture = ExpertLayer(multiplied, gate_up, down, each, normalised, shared_gate, selection, biases, shapes.activation)
            if biases is not None:
                at_bias = f"layers.{index}.experts."
                own |= {f"{at_bias}router_bias": biases.router, f"{at_bias}gate_up_bias": biases.gate_up, f"{at_bias}down_bias": biases.down}
            if selection is not None and selection.bias is not None:
                own[f"layers.{index}.experts.choice_bias"] = selection.bias
            own[f"layers.{index}.experts.router"] = matrices.in_rows(router)
            if experts.shared_gate:
                own[f"layers.{index}.experts.shared_gate"] = matrices.in_rows(f"{at}{SHARED_GATE}")
        mixtures.append(mixture)
        own |= {f"layers.{index}.{norm}.weight": tensors[f"{at}{norm}.weight"] for norm in shapes.layer_norms}
        if shapes.attention_sinks:
            own[f"layers.{index}.sinks"] = tensors[f"{at}{SINKS}"]
        if shapes.latent is not None:
            of_latent = {"q_a_layernorm": "q_a_norm", "kv_a_layernorm": "kv_a_norm"}
            own |= {f"layers.{index}.latent.{of_latent[name]}": tensors[f"{at}self_attn.{name}.weight"] for name, _ in shapes.latent.norms}
        if linear is not None:
            own |= {f"layers.{index}.linear_attention.{here}": tensors[f"{at}linear_attn.{there}"] for here, there in VECTORS.items()}
        elif shapes.qk_norm:
            own |= {f"layers.{index}.{norm}.weight": tensors[f"{at}self_attn.{norm}.weight"] for norm in ("q_norm", "k_norm")}
    head = matrices.stack([EMBEDDING if shapes.tie_word_embeddings else HEAD])
    own["embed_tokens"] = matrices.in_rows(EMBEDDING)
    decoder.adopt(own, layers, mixtures, head if EMBEDDING in shared.in_panels else None, head)


def _biases(experts: ExpertShapes, at: str, tensors: Mapping[str, Tensor]) -> ExpertBiases:
    """Returns the biases of a mixture in the layer ``at``, those of all experts as one."""
    names = experts.names
    of_experts = lambda *kinds: _as_one([tensors[f"{at}{kind.format(e)}.bias"] for e in range(experts.num_experts) for kind in kinds])
    gate_up, down = (stack.view(experts.num_experts, -1) for stack in (of_experts(names.gate, names.up), of_experts(names.down)))
    return ExpertBiases(tensors[f"{at}{names.router}.bias"], gate_up, down)


class _Matrices:
    """The matrices of ``shared`` weights as ``decoder`` needs them: where they are, if the part that it holds is there in the layout of its kernels, or packed
    to memory of its own. Raises ``RunError`` if one is missing or has another size."""

    def __init__(self, decoder: Decoder, shared: SharedTensors) -> None:
        self._kernels, self._shared = decoder.kernels, shared
        self._are_rows = packed_layout(decoder.kernels) == "rows"
        self.known, self._slices = _held(decoder.shapes, decoder.shard_spec)
        for name, shape in self.known.items():
            tensor = shared.tensors.get(name)
            expected = (math.prod(shape),) if name in shared.in_panels else tuple(part.stop - part.start for part in self._slices[name])
            if tensor is None or tensor.shape != expected or tensor.dtype != decoder.dtype:
                raise RunError(f"the published weights do not have '{name}' in the shape of the engine's model")

    def stack(self, names: Sequence[str]) -> Any:
        """Returns the stack of the matrices ``names``, packed: as one, or for a shard in its parts."""
        if self._are_rows:
            tensors = [self._shared.tensors[name] for name in names]
            rows, columns = sum(len(tensor) for tensor in tensors), tensors[0].shape[1]
            return PackedWeight(_as_one([tensor.view(-1) for tensor in tensors]).view(rows, columns), rows, columns)
        there = [self._part(name) for name in names]
        if all(part is None for part in there):
            return self._kernels.pack(torch.cat([self._plain(name) for name in names]))
        parts = [self._kernels.pack(self._plain(name)) if part is None else part for name, part in zip(names, there, strict=True)]
        if len(parts) > 1 and not _is_one_matrix(parts):
            return PackedParts(tuple(parts))
        return PackedWeight(_as_one([part.data for part in parts]), sum(part.rows for part in parts), parts[0].columns)

    def groups(self, stacks: Stacks) -> PackedGroups | PackedParts:
        """Returns the ``stacks`` of all experts, packed: each as one matrix, or for a shard in its parts."""
        if self._are_rows:
            tensors = [self._shared.tensors[name] for stack in stacks for name in stack]
            rows, columns = sum(len(tensor) for tensor in tensors) // len(stacks), tensors[0].shape[1]
            return PackedGroups(_as_one([tensor.view(-1) for tensor in tensors]).view(len(stacks), rows, columns), rows, columns)
        there = [[part for name in stack if (part := self._part(name)) is not None] for stack in stacks]
        strides = [_stride([part.data for part in of_experts]) for of_experts in zip(*there, strict=True)] if _same_length([*there, stacks[0]]) else []
        if not strides or None in strides:
            return self._kernels.pack_groups(torch.stack([torch.cat([self._plain(name) for name in stack]) for stack in stacks]))
        first = there[0]
        if len(first) > 1 and _is_one_matrix(first):
            first = [PackedWeight(_as_one([part.data for part in first]), sum(part.rows for part in first), first[0].columns)]
        groups = [
            PackedGroups(data.as_strided((len(stacks), data.numel()), (stride or data.numel(), 1)), rows, columns)
            for (data, rows, columns), stride in zip(first, strides, strict=False)
        ]
        return groups[0] if len(groups) == 1 else PackedParts(tuple(groups))

    def in_whole_rows(self, name: str) -> Tensor:
        """Returns what the decoder holds of a matrix, in rows."""
        return self._plain(name)

    def in_rows(self, name: str) -> Tensor:
        """Returns a matrix that the decoder has in rows too, or an empty one if it is in panels."""
        tensor = self._shared.tensors[name]
        return tensor.new_empty(0, self.known[name][1]) if name in self._shared.in_panels else tensor

    def _part(self, name: str) -> PackedWeight | None:
        """Returns what the decoder holds of a matrix, where it is; ``None`` if that is not panels there."""
        if name not in self._shared.in_panels:
            return None
        shape, (rows, columns) = self.known[name], self._slices[name]
        run = panels_of_rows(shape, rows.start, rows.stop) if columns.stop - columns.start == shape[1] else None
        return None if run is None else PackedWeight(self._shared.tensors[name][run.start : run.stop], rows.stop - rows.start, shape[1])

    def _plain(self, name: str) -> Tensor:
        """Returns what the decoder holds of a matrix, in rows."""
        tensor, (rows, columns) = self._shared.tensors[name], self._slices[name]
        if name not in self._shared.in_panels:
            return tensor
        return self._kernels.packed_rows(torch.arange(rows.start, rows.stop), PackedWeight(tensor, *self.known[name]))[:, columns]


@lru_cache(maxsize=8)
def _held(shapes: ModelShapes, shard_spec: ShardSpec) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[slice, ...]]]:
    """Returns the whole shape of every published tensor, and what the rank of ``shard_spec`` holds of it."""
    known = dict(published_parameters(shapes))
    return known, {name: shard_slices(shapes, name, shape, shard_spec) for name, shape in known.items()}


def _is_one_matrix(parts: Sequence[PackedWeight]) -> bool:
    """Returns whether matrices in panels are their stack in panels where they are."""
    return is_stackable([part[1:] for part in parts]) and _are_adjacent([part.data for part in parts])


def _same_length(series: Sequence[Sequence[object]]) -> bool:
    return len({len(each) for each in series}) == 1


def _stride(tensors: Sequence[Tensor]) -> int | None:
    """Returns by how many elements each of flat ``tensors`` lies behind the one before it in the same memory, 0 if there is one; ``None`` if they differ."""
    places = [tensor.data_ptr() for tensor in tensors]
    if len({tensor.untyped_storage().data_ptr() for tensor in tensors}) != 1:
        return None
    distances = {after - before for before, after in itertools.pairwise(places)} or {0}
    return distances.pop() // tensors[0].element_size() if len(distances) == 1 else None


def _are_adjacent(tensors: Sequence[Tensor]) -> bool:
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
    is_one = len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    return is_one and [tensor.data_ptr() for tensor in tensors[1:]] == ends[:-1]


def _as_one(tensors: Sequence[Tensor]) -> Tensor:
    """Returns flat tensors as one: a view if they lie one behind the other in the same memory, which those of a stack do."""
    if _are_adjacent(tensors):
        return tensors[0].as_strided((sum(tensor.numel() for tensor in tensors),), (1,))
    return torch.cat([*tensors])
