"""Section ``checkpoint``: the checkpoint interval, how many checkpoints are kept, and where they are copied."""

from dataclasses import dataclass

from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """How often, where and how many checkpoints are saved; `training.md` describes a checkpoint."""

    every_steps: int = 10
    """Optimizer steps between two checkpoints."""
    every_minutes: float = 0.0
    """Maximum minutes between two checkpoints, in addition to `every_steps`. 0: off."""
    keep: int = 2
    """Number of the newest checkpoints to keep, locally and in `upload`."""
    asynchronous: bool = True
    """Write checkpoints while training continues."""
    upload: str = ""
    """Folder or URL to copy each checkpoint to. Empty: none."""

    def check(self) -> None:
        for name in ("every_steps", "keep"):
            if getattr(self, name) < 1:
                raise UserError(f"'checkpoint.{name}' is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.every_minutes < float("inf"):
            raise UserError(f"'checkpoint.every_minutes' is {self.every_minutes}; it must be 0 (off) or more, and finite")
