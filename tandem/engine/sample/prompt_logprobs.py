"""Raw log-probabilities of a prompt's own tokens."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.engine.sample.random_numbers import top_logprobs
from tandem.model.decoder import Decoder

_ELEMENTS = 1 << 23
"""Logits held at a time."""


class PromptScores:
    """``entries[i]``: the ``count`` most likely tokens in the place of prompt token i, and that token itself, as (token id,
    raw log-probability, rank from 1); ``None`` for the first token and for those that are not computed yet.

    The bits are those of ``Kernels.logits_logprobs``, hence of the trainer, whatever the chunks are.
    """

    def __init__(self, tokens: Sequence[int], count: int) -> None:
        self.entries: list[list[tuple[int, float, int]] | None] = [None] * len(tokens)
        self._tokens = list(tokens)
        self._count = count

    @property
    def is_complete(self) -> bool:
        return all(entry is not None for entry in self.entries[1:])

    def note(self, logits_of: Callable[[int, int], Tensor], decoder: Decoder, row: int, count: int, start: int) -> None:
        """Take the ``count`` tokens at positions from ``start`` on, which stand in rows from ``row`` on of a step whose
        logits ``logits_of(first, last)`` gives; each row predicts the token after it. Positions may come again, as after a
        preemption."""
        targets = self._tokens[start + 1 : start + 1 + count]
        rows = max(1, _ELEMENTS // decoder.shapes.vocab_size)
        for first in range(0, len(targets), rows):
            part = torch.tensor(targets[first : first + rows], device=decoder.embed_tokens.device)
            logits = logits_of(row + first, row + first + len(part))
            raw = decoder.kernels.logits_logprobs(logits, part)
            begin = start + 1 + first
            self.entries[begin : begin + len(part)] = top_logprobs(logits, part, raw, [self._count] * len(part))
