"""Section ``checkpoint``: the checkpoint interval, how many checkpoints are kept, and where they are copied."""

from dataclasses import dataclass

from tandem.config.limits import check_at_least_one
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """How often the state of a run is saved, where, and how many checkpoints are kept; `training.md` describes a checkpoint."""

    every_steps: int = 10
    """Optimizer steps between two checkpoints."""
    every_minutes: float = 0.0
    """A checkpoint is also written after so many minutes without one. 0: only by steps."""
    keep: int = 2
    """Newest checkpoints that are kept, here and in `upload`."""
    asynchronous: bool = True
    """Write checkpoints while training continues."""
    upload: str = ""
    """A folder or URL that each checkpoint is copied to. Empty: none. Not in a pod."""

    def check(self) -> None:
        check_at_least_one("checkpoint", self, "every_steps", "keep")
        if not 0 <= self.every_minutes < float("inf"):
            raise UserError(f"'checkpoint.every_minutes' is {self.every_minutes}; it must be 0 (off) or more, and finite")
