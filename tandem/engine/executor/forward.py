"""The arithmetic of one step: the same for an engine alone and for every rank of a tensor-parallel one."""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.executor.flat_batch import FlatBatch
from tandem.kernels.api import KVLayer
from tandem.model.attention import PagedContext
from tandem.model.decoder import Decoder


class Computed(NamedTuple):
    """``hidden`` of the batch's tokens [T, H], or of those that draw alone; the ``logits[R, V]`` of the rows that draw, where
    any does."""

    hidden: Tensor
    logits: Tensor | None


@torch.inference_mode()
def forward(decoder: Decoder, caches: list[KVLayer], batch: FlatBatch, draws: bool, scores: bool) -> Computed:
    """Compute ``batch`` over the cache; a batch of no tokens computes nothing. ``scores``: the hidden state of every token is
    wanted."""
    if not len(batch.tokens):
        return Computed(torch.empty(0, decoder.shapes.hidden_size, device=batch.tokens.device), None)
    distinct, inverse = _distinct(batch.logit_rows)
    # Rows with an adapter are named by their place in the batch, which the last layer must then compute as a whole.
    wanted = None if scores or batch.lora is not None else distinct
    hidden = decoder(batch.tokens, batch.positions, PagedContext(batch.paged, caches, wanted), lora=batch.lora)
    if not draws:
        return Computed(hidden, None)
    drawing = hidden if wanted is not None or distinct is None else hidden.index_select(0, distinct)
    logits = decoder.logits(drawing)
    return Computed(hidden, logits if inverse is None else logits.index_select(0, inverse))


def _distinct(rows: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The distinct ones of the rows that draw, and the place of each row among them (``None``: its own). The sequences
    of a group draw from one row, which is computed once."""
    if rows is None:
        return None, None
    distinct, inverse = torch.unique(rows, return_inverse=True)
    return distinct, None if len(distinct) == len(rows) else inverse
