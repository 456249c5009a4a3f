"""Section ``sft``: supervised fine-tuning on the task's demonstrations before reinforcement learning begins."""

from dataclasses import dataclass
from typing import Literal

from tandem.config.limits import check_at_least_one, check_float32
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class DemonstrationsConfig:
    """The content of a task's demonstrations."""

    corrupted_share: float = 0.0
    """Share of the demonstrations that have a wrong answer."""
    seed: int = 0
    """Seed of the demonstrations and their order, in addition to the run's seed."""

    def check(self, where: str = "demonstrations") -> None:
        """Raises ``UserError`` for an invalid value."""
        if not 0 <= self.corrupted_share < 1:
            raise UserError(f"'{where}.corrupted_share' is {self.corrupted_share}; it must be at least 0 and below 1")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"'{where}.seed' is {self.seed}; it must be between 0 and 2^63 - 1")


@dataclass(frozen=True, slots=True)
class SFTConfig:
    """Supervised fine-tuning on the task's demonstrations before reinforcement learning. The optimizer's other settings are those of section
    `trainer`."""

    steps: int = 225
    """Optimizer steps."""
    batch_size: int = 48
    """Demonstrations per step."""
    learning_rate: float = 2e-3
    """Learning rate after the warm-up."""
    warmup_steps: int = 10
    """Steps in which the learning rate rises linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warm-up; `linear` and `cosine` end at `steps`."""
    corrupted_share: float = 0.5
    """Share of the demonstrations that have a wrong answer, so that reinforcement learning has something to improve."""
    seed: int = 0
    """Seed of the demonstrations and their order, in addition to the run's seed."""
    max_accuracy: float = 0.55
    """Held-out sampled accuracy above which reinforcement learning is not started: a run that begins near its target shows no
    improvement."""

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        check_at_least_one("sft", self, "steps", "batch_size")
        if not 0 < self.learning_rate < float("inf"):
            raise UserError(f"'sft.learning_rate' is {self.learning_rate}; it must be above 0 and finite")
        check_float32("sft", self, "learning_rate")
        if not 0 <= self.warmup_steps < self.steps:
            raise UserError(f"'sft.warmup_steps' is {self.warmup_steps}; it must be at least 0 and below sft.steps ({self.steps})")
        if not 0 < self.max_accuracy <= 1:
            raise UserError(f"'sft.max_accuracy' is {self.max_accuracy}; it must be above 0 and at most 1")
        self.demonstrations.check("sft")

    @property
    def demonstrations(self) -> DemonstrationsConfig:
        return DemonstrationsConfig(self.corrupted_share, self.seed)
