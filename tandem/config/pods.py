"""Section ``pods``: how many pods draw the samples of a run, and when one is left out."""

from dataclasses import dataclass

from tandem.config.limits import check_at_least_one, check_seconds
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class PodsConfig:
    """The pods of a run. The first one has the trainer; every one has a rollout sidecar with `rollout.workers` workers. See `hybrid.md`, Many pods."""

    count: int = 1
    """Number of pods. The samples are the same for any number."""
    deadline_factor: float = 10.0
    """A worker that takes this many times longer to finish a group than the slowest one before counts as stuck; its pod is left out until the next
    update of weights."""
    min_deadline_s: float = 30.0
    """Shortest time in seconds after which a worker counts as stuck. The longest is `machine.call_deadline_s`."""

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        check_at_least_one("pods", self, "count")
        check_seconds("pods", self, "min_deadline_s")
        if not self.deadline_factor > 1:
            raise UserError(f"'pods.deadline_factor' is {self.deadline_factor:g}; it must be more than 1, as the slowest worker is never stuck")
