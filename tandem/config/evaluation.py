"""Section ``evaluation``: how often and on how many prompts the model is evaluated, and the target accuracy."""

from dataclasses import dataclass

from tandem.config.limits import check_at_least_one
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """How often and on how many prompts the model is evaluated, and the target accuracy."""

    every_steps: int = 5
    """Optimizer steps between two evaluations of the sampled accuracy on held-out prompts."""
    prompts: int = 256
    """Number of held-out prompts."""
    target_accuracy: float = 0.9
    """Training ends when `consecutive` evaluations in a row reach this accuracy. A resume may change both."""
    consecutive: int = 2
    """Number of evaluations in a row that must reach `target_accuracy`."""
    final_prompts: int = 1024
    """Number of separate prompts on which the final accuracy is measured."""
    examples: int = 8
    """Number of completions that each evaluation keeps for the report."""

    def check(self) -> None:
        check_at_least_one("evaluation", self, "every_steps", "consecutive", "prompts", "final_prompts")
        if not 0 < self.target_accuracy <= 1:
            raise UserError(f"'evaluation.target_accuracy' is {self.target_accuracy}; it must be above 0 and at most 1")
        if self.examples < 0:
            raise UserError(f"'evaluation.examples' is {self.examples}; it must be 0 or more")
