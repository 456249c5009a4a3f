"""Top log-probabilities of drawn tokens, and prompt log-probabilities."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.model.decoder import Decoder

_ELEMENTS = 1 << 23
"""Maximum number of logits in memory at a time."""


class PromptLogprobs:
    """Collects prompt log-probabilities. ``entries[i]``: the ``count`` most likely tokens at the position of prompt token i, and that token
    itself, as (token id, raw log-probability, rank from 1); ``None`` for the first token and for those that are not computed yet.

    The values have the bits of ``Kernels.logits_logprobs``, hence of the trainer, for any chunks.
    """

    def __init__(self, tokens: Sequence[int], count: int) -> None:
        self.entries: list[list[tuple[int, float, int]] | None] = [None] * len(tokens)
        self._tokens = list(tokens)
        self._count = count

    @property
    def is_complete(self) -> bool:
        return all(entry is not None for entry in self.entries[1:])

    def note(self, logits_of: Callable[[int, int], Tensor], decoder: Decoder, row: int, count: int, start: int) -> None:
        """Records a chunk of the prompt. Positions may be recorded again, as after a preemption.

        Args:
            logits_of: Returns the logits of rows ``first`` to ``last - 1`` of the step; each row predicts the next token.
            decoder: The model.
            row: The row of the step at which the chunk begins.
            count: Tokens of the chunk.
            start: Position of its first token.
        """
        targets = self._tokens[start + 1 : start + 1 + count]
        rows = max(1, _ELEMENTS // decoder.shapes.vocab_size)
        for first in range(0, len(targets), rows):
            part = torch.tensor(targets[first : first + rows], device=decoder.embed_tokens.device)
            logits = logits_of(row + first, row + first + len(part))
            raw = decoder.kernels.logits_logprobs(logits, part)
            begin = start + 1 + first
            self.entries[begin : begin + len(part)] = top_logprobs(logits, part, raw, [self._count] * len(part))


def top_logprobs(
    logits: Tensor, tokens: Tensor, raw: Tensor, counts: list[int]
) -> list[list[tuple[int, float, int]]]:
    """Returns, for row r of ``logits[R, V]``, the ``counts[r]`` most likely tokens (-1: all), followed by the given one of ``tokens[R]`` with
    its raw log-probability ``raw[R]`` if it is not among them: as (token id, raw log-probability, rank from 1). Ties rank by id,
    independently of the counts of other rows."""
    logprobs = logits.contiguous().log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    width = logits.shape[1]
    wanted = [width if count < 0 else min(count, width) for count in counts]
    own = logprobs.gather(1, tokens.unsqueeze(1))
    ranks = ((logprobs > own).sum(1) + 1).tolist()
    likely = _most_likely(logprobs, wanted)
    rows = []
    # The given token keeps the bits of the kernels; torch's log-softmax may differ in the last place.
    for top, token, value, rank in zip(likely, tokens.tolist(), raw.tolist(), ranks, strict=True):
        entries = [(t, value if t == token else other, place) for place, (t, other) in enumerate(top, start=1)]
        if all(t != token for t, _, _ in entries):
            entries.append((token, value, rank))
        rows.append(entries)
    return rows


def _most_likely(logprobs: Tensor, counts: list[int]) -> list[list[tuple[int, float]]]:
    """Returns the ``counts[r]`` largest entries of each row in descending order, ties by id, as (id, value)."""
    largest = max(counts, default=0)
    if not largest:
        return [[] for _ in counts]
    # topk does not specify the order of ties, so only its values are used.
    values = logprobs.topk(largest).values
    place = torch.tensor(counts, device=logprobs.device).unsqueeze(1)
    least = values.gather(1, (place - 1).clamp_min(0)).masked_fill(place == 0, math.inf)
    rows, ids = (logprobs >= least).nonzero(as_tuple=True)
    candidates: list[list[tuple[int, float]]] = [[] for _ in counts]
    for row, token, value in zip(rows.tolist(), ids.tolist(), logprobs[rows, ids].tolist(), strict=True):
        candidates[row].append((token, value))
    return [sorted(entries, key=lambda e: (-e[1], e[0]))[:count] for entries, count in zip(candidates, counts, strict=True)]
