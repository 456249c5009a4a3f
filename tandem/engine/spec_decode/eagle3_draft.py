"""The head of EAGLE-3 as a draft head of the engine."""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.layout.eagle3 import EMBEDDING
from tandem.layout.shapes import ModelShapes
from tandem.model.attention import PagedContext
from tandem.model.decoder import Decoder
from tandem.model.eagle3 import Eagle3Head
from tandem.model.eagle3_folder import fill_eagle3, load_eagle3
from tandem.model.huggingface.model_folder import read_tensors
from tandem.model.huggingface.weight_files import tensor_names
from tandem.types import UserError

_TABLE = "model.embed_tokens.weight"


class Eagle3Draft:
    """The packed ``head`` of a model with ``vocab_size`` tokens."""

    def __init__(self, head: Eagle3Head, vocab_size: int) -> None:
        self.head, self.kernels, self.dtype = head, head.kernels, head.dtype
        self.shapes: ModelShapes = head.shapes.layer
        self.state_layers = head.shapes.aux_layers
        self._vocab_size, self._is_whole = vocab_size, len(head.target_ids) == vocab_size

    def with_weights(self, tensors: Mapping[str, Tensor]) -> "Eagle3Draft":
        """Returns the head with the weights ``tensors``, by their names in its folder, of which an embedding of its own is none. Raises ``UserError`` as
        ``fill_eagle3``."""
        old = self.head
        new = Eagle3Head(old.shapes, old.kernels, dtype=old.dtype, device=old.target_ids.device, embedding=old.embedding)
        new.use_context(old.positions)
        new.target_ids, new.kv_cache_dtype = old.target_ids, old.kv_cache_dtype
        fill_eagle3(new, {**tensors, **({EMBEDDING: old.embed_tokens} if old.shapes.own_embedding else {})})
        new.pack()
        return Eagle3Draft(new, self._vocab_size)

    def use_context(self, tokens: int) -> None:
        """As ``Eagle3Head.use_context``."""
        self.head.use_context(tokens)

    @torch.no_grad()
    def combined(self, states: Tensor) -> Tensor:
        """Returns the hidden states [T, H] that the head reads of the model's, side by side [T, 3 Ht]."""
        return self.head.combined(states.split(self.head.shapes.target_hidden_size, dim=1))

    def compute(self, tokens: Tensor, states: Tensor, positions: Tensor, context: PagedContext) -> Tensor:
        """Returns the hidden states of the next step, before the norm that ``logits`` read."""
        return self.head(tokens, positions, states, context)[1]  # type: ignore[no-any-return]

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """Computes the logits [R, V] of ``states[R, H]``: minus infinity for what the head cannot propose."""
        own = self.head.logits(self.kernels.rms_norm(states.contiguous(), self.head.norm.weight, self.shapes.rms_norm_eps))
        if self._is_whole:
            return own
        return torch.full((len(own), self._vocab_size), float("-inf"), dtype=own.dtype, device=own.device).index_copy_(1, self.head.target_ids, own)


def load_eagle3_draft(folder: str | Path, model_folder: str | Path, model: Decoder) -> Eagle3Draft:
    """Returns the head in ``folder`` for ``model``, which is that of ``model_folder``. Raises ``UserError`` as ``load_eagle3``."""
    shapes, embedding = model.shapes, model.embedded
    if model.group is not None and EMBEDDING not in tensor_names(folder):
        # The model's table is divided between ranks, and the head is computed by the first one.
        table = next((tensor for _, tensor in read_tensors(model_folder, lambda name: name == _TABLE)), None)
        if table is None:
            raise UserError(f"model '{model_folder}': tensor '{_TABLE}' is missing from the weights, which the draft head reads")
        held = table.to(model.device, model.dtype)
        embedding = lambda tokens: F.embedding(tokens, held)
    head = load_eagle3(folder, model.kernels, shapes, dtype=model.dtype, device=model.device, embedding=embedding, pack=True)
    return Eagle3Draft(head, shapes.vocab_size)
