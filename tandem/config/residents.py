"""Section ``residents``: what a pod holds in memory in which phase, and within which budget."""

from dataclasses import dataclass
from typing import Literal

from tandem.config.limits import MOST_GIB
from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class ResidentsConfig:
    """What a pod holds in memory in which phase, and within which budget; `rl.md` has the table of plans. Bits do not change."""

    plan: Literal["auto", "keep", "sleep", "offload", "figure", "terminate"] = "auto"
    """`keep` leaves everything in memory; `sleep` frees the engine's weights and KV cache after a rollout; `offload` also moves each part of the
    trainer away while no phase needs it; `figure` also ends the engine's process; `terminate` also rebuilds the reference from its folder instead of
    saving it. `auto`: the first of these that fits."""
    to: Literal["auto", "memory", "disk"] = "auto"
    """Where `offload`, `figure` and `terminate` save what they move: host `memory` (on a CPU nothing moves: it is there already) or `disk`.
    `auto`: memory if the run is on GPUs and it fits, else disk."""
    prefetch: bool = True
    """Read what the next phase needs while the present one ends, if both fit."""
    device_gib: float = 0.0
    """With GPUs: memory of each that the pod may take, in GiB. 0: what is free. On a CPU the budget is `machine.memory_gib`."""
    disk_gib: float = 0.0
    """Disk space that residents may take, in GiB. 0: what is free."""

    @property
    def offloads(self) -> bool:
        """Whether residents may be saved to a file."""
        return self.plan in ("auto", "offload", "figure", "terminate") and self.to != "memory"

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        for name in ("device_gib", "disk_gib"):
            if not 0 <= getattr(self, name) <= MOST_GIB:
                raise UserError(f"'residents.{name}' is {getattr(self, name)}; it must be 0 (automatic) or more, at most {MOST_GIB}")
        if self.plan in ("keep", "sleep"):
            fix = "set residents.plan to auto, offload, figure or terminate"
            refuse_unread("residents", self, f"residents.plan is '{self.plan}', which saves nothing", "to", "prefetch", "disk_gib", fix=fix)
