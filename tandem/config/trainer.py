"""Section ``trainer``: the optimizer and how much of a batch is in memory at once."""

from dataclasses import dataclass
from typing import Literal

from tandem.types.errors import UserError

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """AdamW (Loshchilov and Hutter, 2019) and the step around it.

    ``learning_rate``: after the warm-up.
    ``warmup_steps``: steps in which the learning rate rises in a straight line; 0 begins with all of it.
    ``schedule``: what it does after the warm-up: stays, falls in a straight line, or falls along half a cosine.
    ``total_steps``: the step at which ``linear`` and ``cosine`` reach their end; ``constant`` does not read it.
    ``final_share``: the share of ``learning_rate`` that is left at ``total_steps`` and after.
    ``beta1``, ``beta2``, ``epsilon``, ``weight_decay``: AdamW's own; norms and biases are never decayed.
    ``max_grad_norm``: global norm to which gradients are clipped; 0 turns clipping off.
    ``micro_batch_tokens``: tokens in one forward and backward at most (a single longer sequence has its own).
    ``dtype``: of weights, gradients and moments.
    """

    learning_rate: float = 1e-6
    warmup_steps: int = 0
    schedule: Schedule = "constant"
    total_steps: int = 0
    final_share: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 16384
    dtype: Literal["float32", "float64"] = "float32"

    def check(self) -> None:
        """Raise ``UserError`` for a value that cannot train."""
        for name in ("learning_rate", "epsilon"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"'trainer.{name}' is {getattr(self, name)}; it must be above 0 and finite")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"'trainer.{name}' is {getattr(self, name)}; it must be at least 0 and below 1")
        for name in ("weight_decay", "max_grad_norm"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(f"'trainer.{name}' is {getattr(self, name)}; it must be 0 (off) or more, and finite")
        for name in ("warmup_steps", "total_steps"):
            if getattr(self, name) < 0:
                raise UserError(f"'trainer.{name}' is {getattr(self, name)}; it must be 0 or more")
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise UserError(
                f"'trainer.total_steps' is {self.total_steps}; schedule '{self.schedule}' needs more than "
                f"trainer.warmup_steps ({self.warmup_steps})"
            )
        if not 0 <= self.final_share <= 1:
            raise UserError(f"'trainer.final_share' is {self.final_share}; it must be between 0 and 1")
        if self.micro_batch_tokens < 1:
            raise UserError(f"'trainer.micro_batch_tokens' is {self.micro_batch_tokens}; it must be at least 1")
