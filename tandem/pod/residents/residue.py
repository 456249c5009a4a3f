"""Finds memory that is left behind at the end of a phase: of residents that should be gone, and of the process."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.layout.residents import Phase, State

SLACK_BYTES = 64 << 20
"""What the allocator of a process may keep more from one visit of a phase to the next."""
VISITS_TO_SETTLE = 2
"""Before the first update there are no moments, and the allocator has kept nothing yet."""


@dataclass
class ResidueCheck:
    """``settled``: by phase, the bytes of the process beside its residents at the end of the second visit, and how often it was visited."""

    settled: dict[Phase, tuple[int, int]] = field(default_factory=dict)

    def of_residents(self, states: Mapping[str, State], held: Mapping[str, int]) -> list[str]:
        """Returns a line for each resident that is not on the device by ``states`` and still ``held``s bytes of it."""
        return [
            f"{name} should be {state} and holds {held[name] / 2**20:,.1f} MiB of the device's memory"
            for name, state in states.items()
            if state is not State.DEVICE and held.get(name, 0)
        ]

    def of_process(self, phase: Phase, process_bytes: int, held: Mapping[str, int]) -> list[str]:
        """Returns a line if the process has, beside its residents, more bytes at the end of ``phase`` than when the phase had settled.
        ``process_bytes``: its resident memory, or what it has allocated of a GPU."""
        beside = process_bytes - sum(held.values())
        first, visits = self.settled.get(phase, (0, 0))
        if visits < VISITS_TO_SETTLE:
            self.settled[phase] = max(beside, first), visits + 1
            return []
        grown = beside - first
        if grown <= SLACK_BYTES + first // 10:
            return []
        return [f"the trainer's process holds {grown / 2**20:,.1f} MiB beside its residents more than at the end of earlier phases '{phase}'"]
