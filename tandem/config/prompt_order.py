"""Section ``rollout.prompt_order``: in which order the prompts of a task are drawn."""

from dataclasses import dataclass
from typing import Literal

from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class PromptOrderConfig:
    """The order in which the training prompts of a finite task are drawn. A task that generates its prompts goes on without end."""

    by: Literal["shuffle", "file", "difficulty", "success_rate"] = "shuffle"
    """`shuffle`: each epoch in another random order. `file`: the order of the file, again and again. `difficulty`: from easy to hard, again and again.
    `success_rate`: each step draws at random in proportion to 1 - the share of a prompt's completions that were correct in earlier steps (Kimi k1.5;
    Kimi Team, 2025, section 2.3.4); a prompt that was not drawn yet counts as never solved."""
    difficulty_key: str = ""
    """For `difficulty`: the key of a number in each row, larger where a prompt is harder; `a.b` is the key `b` inside the key `a`. Equal ones are shuffled."""
    solved_weight: float = 0.05
    """For `success_rate`: the smallest weight, which solved prompts have, so that they are seen again. One that is never solved has weight 1."""

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        if not 0 < self.solved_weight <= 1:
            raise UserError(f"'rollout.prompt_order.solved_weight' is {self.solved_weight}; it must be above 0, so that each can be drawn, and at most 1")
        reason = f"rollout.prompt_order.by is '{self.by}'"
        if self.by != "difficulty":
            refuse_unread("rollout.prompt_order", self, reason, "difficulty_key", fix="set rollout.prompt_order.by to difficulty")
        elif not self.difficulty_key:
            raise UserError("'rollout.prompt_order.difficulty_key' is empty; name the key of the difficulty, a number in each row")
        if self.by != "success_rate":
            refuse_unread("rollout.prompt_order", self, reason, "solved_weight", fix="set rollout.prompt_order.by to success_rate")
