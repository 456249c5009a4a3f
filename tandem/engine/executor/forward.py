"""The arithmetic of one step: the same for an engine alone and for every rank of a tensor-parallel one."""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.executor.model_input import ModelInput
from tandem.engine.executor.row_tensors import to_device
from tandem.kernels.api import KVLayer
from tandem.model.attention import PagedContext
from tandem.model.decoder import Decoder


class Computed(NamedTuple):
    """``hidden`` of the batch's tokens [T, H], or only of those that draw; the ``logits[R, V]`` of the rows that draw, ``None`` where
    none does."""

    hidden: Tensor
    logits: Tensor | None


@torch.inference_mode()
def forward(decoder: Decoder, caches: list[KVLayer], batch: ModelInput, draws: bool, scores: bool) -> Computed:
    """Computes ``batch`` over the cache; an input without tokens computes nothing. ``scores``: the hidden state of every token is
    needed. Nothing waits for the device."""
    device = batch.tokens.device
    if not len(batch.tokens):
        return Computed(torch.empty(0, decoder.shapes.hidden_size, device=device), None)
    distinct, inverse = _distinct(batch.logit_rows, device)
    # Rows with an adapter are named by their place in the batch, which the last layer must then compute as a whole.
    wanted = None if scores or batch.lora is not None else distinct
    hidden = decoder(batch.tokens, batch.positions, PagedContext(batch.paged, caches, wanted), lora=batch.lora)
    if not draws:
        return Computed(hidden, None)
    drawing = hidden if wanted is not None or distinct is None else hidden.index_select(0, distinct)
    logits = decoder.logits(drawing)
    return Computed(hidden, logits if inverse is None else logits.index_select(0, inverse))


def _distinct(rows: Tensor | None, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Returns the distinct ones of the rows that draw, and the place of each row among them (``None``: its own). The sequences of
    a group draw from one row, which is computed once."""
    if rows is None:
        return None, None
    distinct, inverse = torch.unique(rows, return_inverse=True)
    return to_device(distinct, device), None if len(distinct) == len(rows) else to_device(inverse, device)
