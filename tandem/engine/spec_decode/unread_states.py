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


class _Kept(NamedTuple):
    """The ``size`` rows of ``states`` from row ``at`` on: those of the positions from ``first`` on."""

    first: int
    states: Tensor
    at: int
    size: int

    @property
    def end(self) -> int:
        return self.first + self.size

    @property
    def rows(self) -> Tensor:
        return self.states[self.at : self.at + self.size]


@dataclass(slots=True)
class UnreadStates:
    """The ``count`` states of one sequence, by ascending positions; ``end``: the position after the last one that was added. Rows of the states of whole steps
    are cut out when they are read: a step that proposes nothing does nothing in torch for each sequence."""

    kept: list[_Kept] = field(default_factory=list)
    end: int = 0
    count: int = 0

    def add(self, position: int, states: Tensor, at: int, count: int) -> None:
        """Adds ``states[at : at + count, W]`` of the positions from ``position`` on. Those before it are dropped if it does not follow them, and the oldest
        beyond ``MOST_UNREAD``: what the head does not read is missing, or of another sequence, in its cache, which affects acceptance alone."""
        if position != self.end:
            self.kept, self.count = [], 0
        self.kept.append(_Kept(position, states, at, count))
        self.end, self.count = position + count, self.count + count
        while self.count > MOST_UNREAD and len(self.kept) > 1:
            self.count -= self.kept.pop(0).size

    def holds(self, position: int) -> bool:
        """Returns whether the newest state is that of ``position``, and has not been read."""
        return bool(self.kept) and self.kept[-1].end == self.end == position + 1

    def take(self) -> list[Span]:
        """Returns the newest states, those of the last step and ``MOST_READ`` before it, as spans with gaps between them, and keeps the others."""
        newest, left = self.kept.pop(), MOST_READ
        taken = [[newest]]
        while self.kept and left:
            kept = self.kept.pop()
            if kept.size > left:
                self.kept.append(kept._replace(size=kept.size - left))
                kept = _Kept(kept.end - left, kept.states, kept.at + kept.size - left, left)
            left -= kept.size
            if kept.end == taken[0][0].first:
                taken[0].insert(0, kept)
            else:
                taken.insert(0, [kept])
        self.count -= sum(kept.size for span in taken for kept in span)
        return [Span(span[0].first, torch.cat([kept.rows for kept in span]) if len(span) > 1 else span[0].rows) for span in taken]
