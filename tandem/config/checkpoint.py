"""Section ``checkpoint``: the checkpoint interval, how many checkpoints are kept, and where they are copied."""

from dataclasses import dataclass

from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """A checkpoint after every ``every_steps`` optimizer steps, and after ``every_minutes`` without one (0: never for that); the
    newest ``keep`` stay. ``asynchronous``: training goes on while it is written. ``upload``: a folder or URL (``s3://bucket/prefix``)
    that each is copied to, of which as many stay there."""

    every_steps: int = 10
    every_minutes: float = 0.0
    keep: int = 2
    asynchronous: bool = True
    upload: str = ""

    def check(self) -> None:
        for name in ("every_steps", "keep"):
            if getattr(self, name) < 1:
                raise UserError(f"'checkpoint.{name}' is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.every_minutes < float("inf"):
            raise UserError(f"'checkpoint.every_minutes' is {self.every_minutes}; it must be 0 (off) or more, and finite")
