"""The target of a draft head in training: its forward pass, in one piece or stage by stage, and what the head reads of it.

The target may be one rank's part. Its pipeline stages send the hidden states and the embedding that the head reads along with the residual stream, to the
last one, and the tensor-parallel ranks send their parts to the first of them: that rank alone has the head, which is one layer and is not sharded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.layout.eagle3 import Eagle3Shapes
from tandem.layout.pipeline_stages import Span
from tandem.model.attention import PackedContext
from tandem.model.aux_hidden_states import AuxHiddenStates
from tandem.model.decoder import Decoder
from tandem.model.parallel.vocabulary_parallel import gathered_hidden

ROWS_AT_ONCE = 512
"""Rows of the target's logits in memory at once."""


class LastStates(NamedTuple):
    """What the last stage has of a packed batch: the ``hidden`` states behind the final norm, and ``beside`` them what has travelled, each [T, H] or this
    rank's part of it: the embedding, if the head reads it, and the inputs of the layers that it reads, ascending."""

    hidden: Tensor
    beside: tuple[Tensor, ...]


class DraftLabels(NamedTuple):
    """``distribution[R, Vd]``: of the target over the head's vocabulary, fp32; ``best[R]``: its most probable token of all; ``known[R]``: 1.0 where that is in
    the head's vocabulary."""

    distribution: Tensor
    best: Tensor
    known: Tensor


class TargetOutputs(NamedTuple):
    """What a head reads of its target for a packed batch of T tokens, of which it learns the distribution after R. ``states``: the inputs [T, H] of the
    layers, in the order of ``Eagle3Shapes.aux_layers``. ``embedded[T, H]``: the rows of the target's embedding (``None``: the head has its own)."""

    states: list[Tensor]
    embedded: Tensor | None
    labels: DraftLabels


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """The passes of ``model``, which holds some of the stages ``spans``, for a head of ``shapes``. None has a gradient."""

    model: Decoder
    spans: Sequence[Span]
    shapes: Eagle3Shapes

    @property
    def _layers(self) -> list[int]:
        return sorted(set(self.shapes.aux_layers))

    def columns(self, stage: int) -> int:
        """Returns the columns of what goes into ``stage``."""
        return self.model.shapes.hidden_size * self.shapes.travelling(self.spans[stage].start)

    @torch.no_grad()
    def run(self, stage: int, tokens: Tensor, positions: Tensor, context: PackedContext, received: Tensor | None) -> Tensor | LastStates:
        """Runs ``stage`` on a packed batch. ``received``: what the stage before it returned (``None``: it is the first). Returns what goes into the next
        one, [T, ``columns``] or this rank's part of it, or what the last one has."""
        span, model, beside = self.spans[stage], self.model, list[Tensor]()
        if received is not None:
            received, *beside = received.split(model.shapes.hidden_size, dim=1)
            received = received.contiguous()
        elif not self.shapes.own_embedding:
            beside.append(model.whole_embedded(tokens))
        aux = AuxHiddenStates(tuple(layer for layer in self._layers if span.start <= layer < span.stop))
        out = model(tokens, positions, context, span=span, received=received, aux=aux)
        beside += aux.states
        return LastStates(out, tuple(beside)) if span.is_last else torch.cat((out, *beside), dim=1)

    @torch.no_grad()
    def outputs(self, last: LastStates, tokens: int, rows: Tensor, target_ids: Tensor | None) -> TargetOutputs | None:
        """Returns what the head reads, on the rank that has it and gives its ``target_ids[Vd]`` (``None``, on the other tensor-parallel ranks: ``None``).
        Every one of them calls it. ``rows[R]``: those of the batch of ``tokens`` whose distribution the head learns."""
        parallel = self.model.parallel
        hidden = last.hidden if parallel is None else gathered_hidden(parallel, last.hidden, tokens)
        labels = self._labels(hidden, rows, target_ids)
        whole = [self._gathered(each, tokens) for each in last.beside]
        if labels is None:
            return None
        embedded = None if self.shapes.own_embedding else whole.pop(0)
        by_layer = dict(zip(self._layers, whole, strict=True))
        return TargetOutputs([by_layer[layer] for layer in self.shapes.aux_layers], embedded, labels)

    def _gathered(self, x: Tensor, tokens: int) -> Tensor:
        """Returns the rows of all tensor-parallel ranks on the first of them."""
        parallel = self.model.parallel
        if parallel is None or not parallel.sequence or parallel.tensor.size == 1:
            return x
        parts = parallel.tensor.gather(x, 0, "hidden states of a draft head")
        return torch.cat(parts)[:tokens] if parts else x

    def _labels(self, hidden: Tensor, rows: Tensor, target_ids: Tensor | None) -> DraftLabels | None:
        parts = []
        for chosen in rows.split(ROWS_AT_ONCE) if len(rows) else ():
            logits = self.model.first_rank_logits(hidden.index_select(0, chosen))
            if target_ids is not None:
                assert logits is not None
                logits = logits.float()
                parts.append((logits.index_select(1, target_ids).softmax(1), logits.argmax(1)))
        if target_ids is None:
            return None
        if not parts:
            empty = hidden.new_empty(0, dtype=torch.float32)
            return DraftLabels(empty.new_empty(0, len(target_ids)), rows, empty)
        distribution, best = (torch.cat(part) for part in zip(*parts, strict=True))
        return DraftLabels(distribution, best, torch.isin(best, target_ids).float())
