"""The arithmetic of one step: the same for an engine alone and for every rank of a tensor-parallel one."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.block_table import BlockCopy
from tandem.engine.flat_batch import FlatBatch
from tandem.kernels.api import KVLayer
from tandem.model.attention import PagedContext
from tandem.model.decoder import Decoder


class Computed(NamedTuple):
    """``hidden[T, H]`` of the batch's tokens, and the ``logits[R, V]`` of the rows that draw, where any does."""

    hidden: Tensor
    logits: Tensor | None


@torch.inference_mode()
def forward(decoder: Decoder, caches: list[KVLayer], copies: Sequence[BlockCopy], batch: FlatBatch, draws: bool) -> Computed:
    """Copy blocks, then compute ``batch`` over the cache."""
    if copies:
        _copy_blocks(caches, copies)
    hidden = decoder(batch.tokens, batch.positions, PagedContext(batch.paged, caches), lora=batch.lora)
    return Computed(hidden, _logits(decoder, hidden, batch.logit_rows) if draws else None)


def _logits(decoder: Decoder, hidden: Tensor, rows: Tensor | None) -> Tensor:
    """[R, V]. The sequences of a group draw from one row, which is computed once."""
    if rows is None:
        return decoder.logits(hidden)
    distinct, inverse = torch.unique(rows, return_inverse=True)
    logits = decoder.logits(hidden.index_select(0, distinct))
    return logits if len(distinct) == len(rows) else logits.index_select(0, inverse)


def _copy_blocks(caches: list[KVLayer], copies: Sequence[BlockCopy]) -> None:
    sources, targets = torch.tensor(copies, device=caches[0].keys.device).unbind(1)
    for layer in caches:
        layer.keys[targets] = layer.keys[sources]
        layer.values[targets] = layer.values[sources]
