"""Top log-probabilities of drawn tokens, and raw log-probabilities of a prompt's own tokens."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.model.decoder import Decoder

_ELEMENTS = 1 << 23
"""Logits held at a time."""


class PromptLogprobs:
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
        """Takes the ``count`` tokens at positions from ``start`` on, which are in rows from ``row`` on of a step whose
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


def top_logprobs(
    logits: Tensor, tokens: Tensor, raw: Tensor, counts: list[int]
) -> list[list[tuple[int, float, int]]]:
    """For row r of ``logits[R, V]`` the ``counts[r]`` most likely tokens (-1: all), and the given one of ``tokens[R]``,
    whose raw log-probability is ``raw[R]``, where it is not among them: as (token id, raw log-probability, rank from 1).
    Equals rank by id, however many are asked for in the rows beside."""
    logprobs = logits.contiguous().log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    width = logits.shape[1]
    wanted = [width if count < 0 else min(count, width) for count in counts]
    own = logprobs.gather(1, tokens.unsqueeze(1))
    ranks = ((logprobs > own).sum(1) + 1).tolist()
    likely = _most_likely(logprobs, wanted)
    found = []
    # The kernels' own bits for the given token: torch's differ in the last place.
    for top, token, value, rank in zip(likely, tokens.tolist(), raw.tolist(), ranks, strict=True):
        entries = [(t, value if t == token else other, place) for place, (t, other) in enumerate(top, start=1)]
        if all(t != token for t, _, _ in entries):
            entries.append((token, value, rank))
        found.append(entries)
    return found


def _most_likely(logprobs: Tensor, counts: list[int]) -> list[list[tuple[int, float]]]:
    """The ``counts[r]`` largest entries of each row, the largest first and equals by id, as (id, value)."""
    largest = max(counts, default=0)
    if not largest:
        return [[] for _ in counts]
    # topk leaves open which of equal values it names, so only its values are used.
    values = logprobs.topk(largest).values
    place = torch.tensor(counts, device=logprobs.device).unsqueeze(1)
    least = values.gather(1, (place - 1).clamp_min(0)).masked_fill(place == 0, math.inf)
    rows, ids = (logprobs >= least).nonzero(as_tuple=True)
    found: list[list[tuple[int, float]]] = [[] for _ in counts]
    for row, token, value in zip(rows.tolist(), ids.tolist(), logprobs[rows, ids].tolist(), strict=True):
        found[row].append((token, value))
    return [sorted(entries, key=lambda e: (-e[1], e[0]))[:count] for entries, count in zip(found, counts, strict=True)]
