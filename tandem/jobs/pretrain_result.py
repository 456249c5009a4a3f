"""What a pretraining run has come to."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class PretrainResult:
    """``before`` and ``loss``: nats a token on the held-out data (``None``: there is none)."""

    directory: Path
    steps: int
    before: float | None
    loss: float | None
    model: Path
    report: Path
    commands: tuple[str, ...]

    def summary(self) -> str:
        """What a person wants to know at the end."""
        held_out = ""
        if self.loss is not None and self.before is not None:
            held_out = f": held-out loss {self.before:.4f} -> {self.loss:.4f} (perplexity {math.exp(min(self.loss, 700.0)):.2f})"
        lines = [f"{self.steps} steps{held_out}", f"report: {self.report}", "try the model:", *(f"  {command}" for command in self.commands)]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain data; ``from_json`` reads it back."""
        return {**asdict(self), "directory": str(self.directory), "model": str(self.model), "report": str(self.report)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PretrainResult":
        paths = {name: Path(data[name]) for name in ("directory", "model", "report")}
        return cls(**{**data, **paths, "commands": tuple(data["commands"])})
