"""The section ``length`` of a reward function ``length``."""

from dataclasses import dataclass
from typing import Literal

from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class LengthRewardConfig:
    """How the length of a completion, in tokens that the model sampled, is rewarded, beside a function that says what is correct."""

    rule: Literal["kimi", "soft_overlong", "target"] = "soft_overlong"
    """`kimi` (Kimi k1.5): 0.5 - (length - shortest) / (longest - shortest) in the prompt's group, at most 0 for a wrong answer, as `rewards.accuracy` says;
    0 where all have one length. `soft_overlong` (DAPO): 0 up to `max_tokens - buffer_tokens`, then falling to -1 at `max_tokens`. `target`: the distance from
    `target_tokens` in shares of it, from 0 to -1."""
    start_step: int = 0
    """The step from which lengths are rewarded; 0 before. Kimi k1.5 learns to be right first."""
    max_tokens: int = 0
    """For `soft_overlong`: the length with the whole penalty, normally `rollout.max_tokens`."""
    buffer_tokens: int = 0
    """For `soft_overlong`: the tokens before `max_tokens` in which the penalty grows."""
    target_tokens: int = 0
    """For `target`: the best length."""

    def check(self) -> None:
        needed = {"kimi": (), "soft_overlong": ("max_tokens", "buffer_tokens"), "target": ("target_tokens",)}[self.rule]
        for name in ("max_tokens", "buffer_tokens", "target_tokens"):
            value = getattr(self, name)
            if name in needed and not 1 <= value <= 10**9:
                raise UserError(f"'length.{name}' of a reward function is {value}; the rule {self.rule} needs 1 or more")
            if name not in needed and value:
                raise UserError(f"'length.{name}' of a reward function is {value}, and the rule {self.rule} does not read it; remove it")
        if self.buffer_tokens > self.max_tokens:
            raise UserError(f"'length.buffer_tokens' of a reward function is {self.buffer_tokens}, more than length.max_tokens ({self.max_tokens})")
        if not 0 <= self.start_step <= 10**9:
            raise UserError(f"'length.start_step' of a reward function is {self.start_step}; it must be 0 or more")
