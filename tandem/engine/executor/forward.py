"""The forward pass of one step, in a single process and on every tensor-parallel rank."""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.executor.model_input import ModelInput
from tandem.engine.executor.row_tensors import to_device
from tandem.kernels.api import CacheLayer
from tandem.model.attention import PagedContext
from tandem.model.aux_hidden_states import AuxHiddenStates
from tandem.model.decoder import Decoder


class Computed(NamedTuple):
    """``hidden``: the hidden states [T, H] of the batch's tokens, or of the drawing rows only. ``logits[R, V]``: of the rows that draw,
    ``None`` if none does."""

    hidden: Tensor
    logits: Tensor | None


@torch.inference_mode()
def forward(
    decoder: Decoder, caches: list[CacheLayer], batch: ModelInput, draws: bool, scores: bool, aux: AuxHiddenStates | None = None
) -> Computed:
    """Computes ``batch`` over the KV cache. ``draws``: whether logits are needed; ``scores``: whether the hidden states of all tokens are.
    ``aux``: receives those within the model. Never waits for the device."""
    device = batch.tokens.device
    if not len(batch.tokens):
        return Computed(torch.empty(0, decoder.shapes.hidden_size, device=device), None)
    distinct, inverse = _distinct(batch.logit_rows, device)
    # A LoRA batch refers to rows by their index in the batch, so the last layer must then compute all of them.
    wanted = None if scores or batch.lora is not None else distinct
    hidden = decoder(batch.tokens, batch.positions, PagedContext(batch.paged, caches, wanted), lora=batch.lora, aux=aux)
    if not draws:
        return Computed(hidden, None)
    drawing = hidden if wanted is not None or distinct is None else hidden.index_select(0, distinct)
    logits = decoder.logits(drawing)
    return Computed(hidden, logits if inverse is None else logits.index_select(0, inverse))


def _distinct(rows: Tensor | None, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Returns the distinct drawing rows, and the index of each row among them (``None``: the identity). The sequences of a group draw from
    the same row, which is computed once."""
    if rows is None:
        return None, None
    distinct, inverse = torch.unique(rows, return_inverse=True)
    return to_device(distinct, device), None if len(distinct) == len(rows) else to_device(inverse, device)
