"""The hidden states of the model that a draft head has not read yet."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

MOST_UNREAD = 64
"""Positions that a sequence keeps, as many as the longest rest between two proposals."""


@dataclass(slots=True)
class UnreadStates:
    """The states [T, W] of consecutive positions of one sequence, from position ``first`` on, in ``parts``."""

    first: int = 0
    parts: list[Tensor] = field(default_factory=list)
    end: int = 0
    """The position after the last one."""

    def add(self, position: int, states: Tensor) -> None:
        """Adds ``states[T, W]`` of the positions from ``position`` on. Those before it are dropped if it does not follow them, and the oldest beyond
        ``MOST_UNREAD``: what the head does not read is missing, or of another sequence, in its cache, which affects acceptance alone."""
        if position != self.end:
            self.first, self.parts = position, []
        self.parts.append(states)
        self.end = position + len(states)
        while len(self.parts) > 1 and self.end - self.first > MOST_UNREAD:
            self.first += len(self.parts.pop(0))

    def take(self) -> Tensor:
        """Returns all of them, [T, W], and keeps none."""
        states = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
        self.first, self.parts = self.end, []
        return states
