"""Section ``checkpoint``: how often the truth is written down, and how many of the older ones stay."""

from dataclasses import dataclass

from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """A checkpoint after every ``every_steps`` optimizer steps; the newest ``keep`` stay."""

    every_steps: int = 10
    keep: int = 2

    def check(self) -> None:
        for name in ("every_steps", "keep"):
            if getattr(self, name) < 1:
                raise UserError(f"'checkpoint.{name}' is {getattr(self, name)}; it must be at least 1")
