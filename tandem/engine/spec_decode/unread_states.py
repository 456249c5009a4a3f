"""The hidden states of the model that a draft head has not read yet."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

MOST_UNREAD = 64
"""Positions that a sequence keeps, as many as the longest rest between two proposals."""
MOST_READ = 8
"""Positions that a proposal reads beside those of the step before it, so that the first one after a rest takes hardly longer than the next ones. The others
are read by those: keys and values of a head, which has one layer, depend on nothing at other positions, and can come in any order."""


class Span(NamedTuple):
    """The ``states`` [T, W] of consecutive positions from ``first`` on."""

    first: int
    states: Tensor

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.first + len(self.states)


@dataclass(slots=True)
class UnreadStates:
    """The states of one sequence, in ``spans`` of ascending positions; ``end``: the position after the last one that was added."""

    spans: list[Span] = field(default_factory=list)
    end: int = 0

    def add(self, position: int, states: Tensor) -> None:
        """Adds ``states[T, W]`` of the positions from ``position`` on. Those before it are dropped if it does not follow them, and the oldest beyond
        ``MOST_UNREAD``: what the head does not read is missing, or of another sequence, in its cache, which affects acceptance alone."""
        if position != self.end:
            self.spans = []
        self.spans.append(Span(position, states))
        self.end = position + len(states)
        while len(self.spans) > 1 and sum(len(span.states) for span in self.spans) > MOST_UNREAD:
            del self.spans[0]

    def holds(self, position: int) -> bool:
        """Returns whether the newest state is that of ``position``, and has not been read."""
        return bool(self.spans) and self.spans[-1].end == self.end == position + 1

    def take(self) -> list[Span]:
        """Returns the newest states, those of the last step and ``MOST_READ`` before it, as spans with gaps between them, and keeps the others."""
        taken, left = [self.spans.pop()], MOST_READ
        while self.spans and left:
            span = self.spans.pop()
            if len(span.states) > left:
                self.spans.append(Span(span.first, span.states[:-left]))
                span = Span(span.end - left, span.states[-left:])
            left -= len(span.states)
            if span.end == taken[0].first:
                taken[0] = Span(span.first, torch.cat((span.states, taken[0].states)))
            else:
                taken.insert(0, span)
        return taken
