"""Section ``algorithm.filter_groups``: dynamic sampling."""

from dataclasses import dataclass
from typing import Literal

from tandem.config.limits import check_at_least_one
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class FilterGroupsConfig:
    """Dynamic sampling (DAPO; Yu et al., 2025, section 3.2): groups whose completions all have the same reward teach nothing. They are dropped, and further
    prompts are drawn, until a step has `rollout.prompts_per_step` groups or has taken `max_num_gen_batches` rounds. An empty section (`{}`) turns it on."""

    metric: Literal["reward", "accuracy"] = "reward"
    """What must differ within a group: the `reward`, or whether completions are correct (`accuracy`), which length penalties do not change."""
    max_num_gen_batches: int = 10
    """Maximum number of rounds of a step, the first one included. A step that has fewer groups then trains on those."""
    gen_batch_size: int = 0
    """Prompts of a round. 0: `rollout.prompts_per_step`. Groups beyond `rollout.prompts_per_step` are left out, the last dispatched first."""

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        check_at_least_one("algorithm.filter_groups", self, "max_num_gen_batches")
        if self.gen_batch_size < 0:
            raise UserError(f"'algorithm.filter_groups.gen_batch_size' is {self.gen_batch_size}; it must be 0 (rollout.prompts_per_step) or more")
