"""The tensors of the KV cache and the swap space, and copies of blocks between them.

The first axis of each tensor of a layer of the cache is the block.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.engine.kv_cache.block_pool import BlockCopy
from tandem.kernels import CacheLayer, empty_cache, empty_latent_cache, stored_dtype
from tandem.kernels.api import StateLayer, untouched_zeros
from tandem.kernels.mixed import activation_dtype
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.types.kv_cache import KVCacheDtype


def make_cache(decoder: Decoder, blocks: int, kv_cache_dtype: KVCacheDtype = "auto", rows: int = 0) -> list[CacheLayer]:
    """Returns an empty cache of ``blocks`` blocks for the layers of ``decoder`` and the heads on its rank; layers with linear attention have ``rows`` rows of
    states in place of blocks, those of snapshots among them."""
    weights = decoder.embed_tokens
    cache = make_cache_of(decoder.local, blocks, stored_dtype(kv_cache_dtype, activation_dtype(decoder.kernels, weights.dtype)), weights.device)
    of_blocks = iter(cache)
    linear = (decoder.local.linear_attention_of(layer) for layer in range(decoder.local.num_hidden_layers))
    return [next(of_blocks) if each is None else empty_states(each, rows, weights.dtype, weights.device) for each in linear]


def make_cache_of(shapes: ModelShapes, blocks: int, dtype: torch.dtype, device: torch.device) -> list[CacheLayer]:
    """Returns an empty cache of ``blocks`` blocks for those layers of ``shapes`` that have one."""
    if shapes.latent is not None:
        # All tensor-parallel ranks hold the whole of it.
        return [*empty_latent_cache(blocks, shapes.latent.cached_size, shapes.cached_layers, dtype, device)]
    return [*empty_cache((blocks, shapes.num_key_value_heads, shapes.head_dim), shapes.cached_layers, dtype, device)]


def empty_states(sizes: LinearAttention, rows: int, dtype: torch.dtype, device: torch.device) -> StateLayer:
    """Returns the states of ``rows`` sequences in a layer of a model of ``dtype``, in at least fp32."""
    zeros = lambda *shape: untouched_zeros((rows, *shape), torch.promote_types(dtype, torch.float32), device)
    return StateLayer(zeros(sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim), zeros(sizes.kernel_size - 1, sizes.mixed_size))


def copy_states(sources: Sequence[CacheLayer], targets: Sequence[CacheLayer], copies: Sequence[tuple[int, int]]) -> None:
    """Copies the states at row ``source`` of every source layer that has any to row ``target`` of the target layer, for each of ``copies``."""
    if not copies:
        return
    source, target = torch.tensor(copies).unbind(1)
    for old, new in zip(sources, targets, strict=False):
        if isinstance(old, StateLayer) and isinstance(new, StateLayer):
            for from_tensor, to_tensor in zip(old, new, strict=True):
                staging = from_tensor.index_select(0, source.to(from_tensor.device))
                to_tensor.index_copy_(0, target.to(to_tensor.device), staging.to(to_tensor.device))


def host_pool(caches: Sequence[CacheLayer], blocks: int, rows: int = 0) -> list[CacheLayer]:
    """Returns ``blocks`` blocks, or ``rows`` rows of states, of host memory for each layer of ``caches``; page-locked if those are on a GPU."""

    def like(layer: CacheLayer) -> CacheLayer:
        size = rows if isinstance(layer, StateLayer) else blocks
        empty = lambda tensor: torch.empty(size, *tensor.shape[1:], dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        tensors: list[Any] = [None if tensor is None else empty(tensor) for tensor in layer]
        return type(layer)(*tensors)

    return [like(layer) for layer in caches]


class Moves(NamedTuple):
    """Copies that a step makes before it computes anything, in this order: of blocks to host memory, from host memory and within the cache, then of states
    those that the step before has asked for and those of ``StateCopies``."""

    swap_outs: Sequence[BlockCopy] = ()
    swap_ins: Sequence[BlockCopy] = ()
    copies: Sequence[BlockCopy] = ()
    state_copies: Sequence[BlockCopy] = ()
    state_swap_outs: Sequence[BlockCopy] = ()
    state_swap_ins: Sequence[BlockCopy] = ()
    state_saves: Sequence[BlockCopy] = ()
    state_loads: Sequence[BlockCopy] = ()


def apply_moves(caches: Sequence[CacheLayer], host: Sequence[CacheLayer], moves: Moves) -> None:
    """Makes ``moves`` between ``caches`` and ``host``, layer by layer."""
    if not any(moves):
        return
    for sources, targets, copies in (
        (caches, host, moves.swap_outs), (host, caches, moves.swap_ins), (caches, caches, moves.copies),
    ):
        if copies:
            _copy_blocks(sources, targets, copies)
    for sources, targets, copies in (
        (caches, caches, moves.state_copies), (caches, host, moves.state_swap_outs), (host, caches, moves.state_swap_ins),
        (caches, caches, moves.state_saves), (caches, caches, moves.state_loads),
    ):
        copy_states(sources, targets, copies)


def _copy_blocks(sources: Sequence[CacheLayer], targets: Sequence[CacheLayer], copies: Sequence[BlockCopy]) -> None:
    """Copies block ``copy.source`` of each source layer to block ``copy.target`` of the target layer. Each tensor of a layer goes through one
    staging tensor, so that scattered blocks need only one transfer between devices."""
    source, target = torch.tensor(copies).unbind(1)
    for old, new in zip(sources, targets, strict=True):
        for from_tensor, to_tensor in zip(old.tensors(), new.tensors(), strict=True):
            old_codes, new_codes = _plain(from_tensor), _plain(to_tensor)
            staging = old_codes.index_select(0, source.to(old_codes.device))
            new_codes.index_copy_(0, target.to(new_codes.device), staging.to(new_codes.device))


def block_bytes(caches: Sequence[CacheLayer]) -> int:
    """Returns the bytes of one block in all layers of ``caches``."""
    return sum(tensor[0].nbytes for layer in caches for tensor in layer.tensors())


def read_blocks(caches: Sequence[CacheLayer], blocks: Sequence[int], rows: Tensor) -> None:
    """Copies each of ``blocks`` to a row of ``rows[len(blocks), block_bytes]`` (uint8, on the CPU): its part of every tensor of every layer, in order."""
    index, at = torch.tensor(blocks), 0
    for tensor in _byte_tensors(caches):
        rows[:, at : at + tensor.shape[1]] = tensor.index_select(0, index.to(tensor.device)).to("cpu")
        at += tensor.shape[1]


def write_blocks(caches: Sequence[CacheLayer], blocks: Sequence[int], rows: Tensor) -> None:
    """Copies the rows that ``read_blocks`` has made to ``blocks``."""
    index, at = torch.tensor(blocks), 0
    for tensor in _byte_tensors(caches):
        tensor.index_copy_(0, index.to(tensor.device), rows[:, at : at + tensor.shape[1]].to(tensor.device))
        at += tensor.shape[1]


def _byte_tensors(caches: Sequence[CacheLayer]) -> Iterator[Tensor]:
    """Yields every tensor of ``caches`` as bytes ``[N, bytes of a block]`` over the same memory."""
    for layer in caches:
        for tensor in layer.tensors():
            yield tensor.view(tensor.shape[0], -1).view(torch.uint8)


def _plain(tensor: Tensor) -> Tensor:
    """Returns 8-bit numbers viewed as bytes, since torch cannot copy float8 by index on a CPU."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
