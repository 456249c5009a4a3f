"""Reads back the weights that a model of vLLM computes with, under their Hugging Face names. Runs inside vLLM; imports nothing of it.

On a CPU vLLM packs the matrix of a linear layer into a form of its library's own and drops the original, so that there are no bytes to look at, and vLLM's own
``/weight_checker`` digests an empty tensor. The product of the packed matrix with the identity is the matrix: each element is one product with 1 and a sum
of zeros, which are exact in every dtype. What is read back has gone through the code of a forward pass. Only the sign of a zero is lost.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

PROBE_ROWS = 256
"""Rows of the identity that go through a layer at once; what comes back has as many rows of its outputs."""


class Held(NamedTuple):
    """``tensor``: what this rank holds of the published tensor ``published`` (empty: of none; it is a buffer). ``name``: of this copy of it. ``is_padded``:
    rows of zeros follow those of the vocabulary."""

    name: str
    published: str
    tensor: Tensor
    is_padded: bool = False


def held_weights(model: nn.Module) -> Iterator[Held]:
    """Yields all that this rank of ``model`` holds, layer by layer: shards of published tensors, where rows of several were packed into one matrix divided
    again, then buffers. A head that is packed beside its parameter, or is the embedding of a model that ties both, is a further copy."""
    together: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    head, first_names = getattr(model, "lm_head", None), dict[int, str]()
    for path, layer in model.named_modules():
        if hasattr(layer, "w13_weight"):
            yield from _experts(layer, path)
            continue
        parent, _, last = path.rpartition(".")
        names = [f"{parent}.{name}" if parent else name for name in together.get(last, (last,))]
        for kind, parameter in layer.named_parameters(recurse=False):
            own = [f"{name}.{kind}" for name in names]
            is_packed = kind == "weight" and hasattr(layer, "cpu_linear") and parameter.dim() < 3
            if not parameter.numel() and is_packed:
                yield from _divided(layer, own, _unpacked(layer, parameter))
                continue
            published = first_names.setdefault(id(parameter), own[0])
            if published == own[0]:
                yield from _divided(layer, own, parameter.detach())
            if is_packed and layer is head:
                yield Held(f"{own[0]} (packed)", published, _unpacked(layer, parameter), is_padded=True)
    for path, buffer in model.named_buffers():
        yield Held(path, "", buffer.detach())


def _divided(layer: Any, names: Sequence[str], tensor: Tensor) -> Iterator[Held]:
    """Yields the rows of ``tensor`` that belong to each of ``names``."""
    sizes = list(layer.output_partition_sizes) if len(names) > 1 else [len(tensor)]
    for name, rows in zip(names, tensor.split(sizes), strict=True):
        yield Held(name, name, rows, is_padded=hasattr(layer, "num_embeddings_padded"))


def _experts(layer: Any, path: str) -> Iterator[Held]:
    """Yields the matrices of each expert of a mixture, which a CPU has packed beside each other: those of gate and up in ``w13_weight[E, 2 I, H]``."""
    isa, parent = layer.quant_method.moe_kernel.fused_experts.isa, path.rpartition(".")[0]
    gate_up, down = _unpacked_experts(layer.w13_weight, isa), _unpacked_experts(layer.w2_weight, isa)
    for expert in range(len(down)):
        gate, up = gate_up[expert].chunk(2)
        for last, part in ((layer.ckpt_gate_proj_name, gate), (layer.ckpt_up_proj_name, up), (layer.ckpt_down_proj_name, down[expert])):
            name = f"{parent}.{expert}.{last}.weight"
            yield Held(name, name, part)


def _unpacked_experts(packed: Tensor, isa: str) -> Tensor:
    """Returns the matrices [E, N, K] that ``packed`` has in another order of their elements."""
    places = _packed_places(packed.shape[1], packed.shape[2], packed.dtype, isa)
    plain = torch.empty_like(packed)
    plain.flatten(1)[:, places] = packed.flatten(1)
    return plain


def _packed(experts: Tensor, isa: str) -> Tensor:
    """Returns ``experts[E, N, K]`` as vLLM packs them, by its own function."""
    packed = torch.empty_like(experts)
    torch.ops._C.prepack_moe_weight(experts, packed, isa)
    return packed


@lru_cache(maxsize=8)
def _packed_places(rows: int, columns: int, dtype: torch.dtype, isa: str) -> Tensor:
    """Returns which element of a matrix each element of its packed form is: [rows * columns] int64. vLLM packs the numbers of the elements, digit by digit, so
    that any dtype holds them."""
    numbers, places, base = torch.arange(rows * columns), torch.zeros(rows * columns, dtype=torch.int64), 1
    while base < rows * columns:
        digits = (numbers // base % 128).to(dtype).view(1, rows, columns)
        places += _packed(digits, isa).flatten().long() * base
        base *= 128
    return places


def _unpacked(layer: Any, parameter: Tensor) -> Tensor:
    """Returns the matrix [outputs, inputs] that ``layer`` multiplies with, from its products with the rows of the identity."""
    inputs = int(layer.input_size_per_partition if hasattr(layer, "input_size_per_partition") else layer.input_size)
    columns = []
    for first in range(0, inputs, PROBE_ROWS):
        places = torch.arange(min(PROBE_ROWS, inputs - first))
        rows = torch.zeros(len(places), inputs, dtype=parameter.dtype, device=parameter.device)
        rows[places, first + places] = 1
        columns.append(layer.cpu_linear(rows, parameter, None))
    return torch.cat(columns).t().contiguous()


def shard_of(whole: Tensor, held: Sequence[int], rank: int, ranks: int, *, is_padded: bool = False) -> Tensor:
    """Returns the part of ``whole`` that tensor-parallel rank ``rank`` of ``ranks`` holds as a tensor of shape ``held``: an equal share of one dim, which
    several ranks have if there are fewer shares than ranks (keys and values). ``is_padded``: of the rows of a vocabulary, which zeros follow, so that there
    are as many shares as ranks. Raises ``ValueError`` for a shape that is no such share."""
    if tuple(held) == tuple(whole.shape):
        return whole
    differing = [dim for dim, (size, total) in enumerate(zip(held, whole.shape, strict=False)) if size != total]
    if len(held) != whole.dim() or len(differing) != 1:
        raise ValueError(f"its shape is {list(held)}, of {list(whole.shape)}")
    (dim,) = differing
    size, total = held[dim], whole.shape[dim]
    if is_padded:
        whole = torch.cat([whole, whole.new_zeros(max(0, size * ranks - total), *whole.shape[1:])])
        return whole[rank * size : (rank + 1) * size]
    shares = total // size
    if total % size or ranks % shares:
        raise ValueError(f"its shape is {list(held)}, of {list(whole.shape)} on {ranks} ranks")
    return whole.narrow(dim, rank // (ranks // shares) * size, size)


def digest(tensor: Tensor) -> str:
    """Returns the xxh3-128, in hexadecimal, of the bytes of ``tensor``, in which every zero is positive."""
    plain = (tensor.detach() + 0).contiguous().cpu()
    memory = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr())
    return str(xxhash.xxh3_128_hexdigest(memory))
