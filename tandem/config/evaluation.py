"""Section ``evaluation``: how often the model is measured, on how much, and when it is good enough."""

from dataclasses import dataclass

from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """Sampled accuracy on ``prompts`` held-out prompts after every ``every_steps`` optimizer steps. Training ends when
    ``consecutive`` evaluations in a row reach ``target_accuracy``; the final figure is taken on ``final_prompts``
    others. ``examples``: completions that each evaluation keeps for the report."""

    every_steps: int = 5
    prompts: int = 256
    target_accuracy: float = 0.9
    consecutive: int = 2
    final_prompts: int = 1024
    examples: int = 8

    def check(self) -> None:
        for name in ("every_steps", "prompts", "consecutive", "final_prompts"):
            if getattr(self, name) < 1:
                raise UserError(f"'evaluation.{name}' is {getattr(self, name)}; it must be at least 1")
        if not 0 < self.target_accuracy <= 1:
            raise UserError(f"'evaluation.target_accuracy' is {self.target_accuracy}; it must be above 0 and at most 1")
        if self.examples < 0:
            raise UserError(f"'evaluation.examples' is {self.examples}; it must be 0 or more")
