"""Section ``warm_up``: supervised fine-tuning on demonstrations before reinforcement learning begins."""

from dataclasses import dataclass
from typing import Literal

from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class WarmUpConfig:
    """Supervised fine-tuning on demonstrations before reinforcement learning begins. Without the section there is none; the optimizer's
    other settings are those of `trainer`."""

    steps: int = 225
    """Optimizer steps."""
    batch_size: int = 48
    """Demonstrations in each."""
    learning_rate: float = 2e-3
    """The learning rate after this section's own warm-up steps."""
    warmup_steps: int = 10
    """Steps in which the learning rate rises."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """`constant`, `linear` or `cosine`; a schedule that falls ends at `steps`."""
    corrupted_share: float = 0.5
    """How many demonstrations have a wrong answer, so that something is left to learn. `sort` and `addition` can make wrong answers; for
    `jsonl` and `reasoning_gym` it must be 0."""
    seed: int = 0
    """Of the demonstrations and their order, besides the run's own."""
    max_accuracy: float = 0.55
    """Held-out sampled accuracy above which the warm start is refused: a run that begins near its target shows nothing."""

    def check(self) -> None:
        """Raise ``UserError`` for a value that cannot train."""
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"'warm_up.{name}' is {getattr(self, name)}; it must be at least 1")
        if not 0 < self.learning_rate < float("inf"):
            raise UserError(f"'warm_up.learning_rate' is {self.learning_rate}; it must be above 0 and finite")
        if not 0 <= self.warmup_steps < self.steps:
            raise UserError(
                f"'warm_up.warmup_steps' is {self.warmup_steps}; "
                f"it must be at least 0 and below warm_up.steps ({self.steps})"
            )
        if not 0 <= self.corrupted_share < 1:
            raise UserError(f"'warm_up.corrupted_share' is {self.corrupted_share}; it must be at least 0 and below 1")
        if not 0 < self.max_accuracy <= 1:
            raise UserError(f"'warm_up.max_accuracy' is {self.max_accuracy}; it must be above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"'warm_up.seed' is {self.seed}; it must be between 0 and 2^63 - 1")
