"""Section ``health``: what is watched of ranks, links and nodes while a run works."""

from dataclasses import dataclass

from tandem.config.limits import MOST_GIB, MOST_SECONDS
from tandem.types.errors import UserError

MOST_STEPS = 4096
FEWEST_STEPS = 8


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """What is watched of the ranks, links and nodes of a run while it works. See `health.md`."""

    straggler_factor: float = 1.3
    """A rank whose own work in a step takes this many times that of the ranks with equal work is named as a straggler. 0: none is."""
    straggler_steps: int = 16
    """Steps of which the median counts."""
    every_s: float = 30.0
    """Seconds between two looks of each node at its GPUs and at the memory of the run's processes. 0: it never looks."""
    memory_growth_gib_per_h: float = 1.0
    """A process of the run whose memory has grown by more than so many GiB an hour, in a straight line, is named."""

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        if self.straggler_factor and not 1 < self.straggler_factor <= 1000:
            raise UserError(f"'health.straggler_factor' is {self.straggler_factor:g}; it must be above 1, at most 1000, or 0 to watch no rank")
        if not FEWEST_STEPS <= self.straggler_steps <= MOST_STEPS:
            raise UserError(f"'health.straggler_steps' is {self.straggler_steps}; give a number of steps from {FEWEST_STEPS} to {MOST_STEPS}")
        if self.every_s and not 0.1 <= self.every_s <= MOST_SECONDS:
            raise UserError(f"'health.every_s' is {self.every_s:g}; it must be from 0.1 to {MOST_SECONDS} seconds, or 0 to look never")
        if not 0 < self.memory_growth_gib_per_h <= MOST_GIB:
            raise UserError(f"'health.memory_growth_gib_per_h' is {self.memory_growth_gib_per_h:g}; it must be above 0, at most {MOST_GIB}")
