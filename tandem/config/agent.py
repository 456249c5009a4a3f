"""Section ``rollout.agent``: episodes of an agent that was not written for training, which calls the model over HTTP."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.config.limits import check_at_least_one, check_seconds
from tandem.config.multi_turn import ToolCallParser
from tandem.types.errors import UserError

if TYPE_CHECKING:
    from tandem.config.recipe import Recipe


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Episodes of an agent that was not written for training: a function that is given the question of a prompt, calls the model through OpenAI's API at
    `OPENAI_BASE_URL`, and returns its answer, which the reward functions read. `rollout.max_tokens` is the maximum length of what follows the
    first request's prompt, later requests included."""

    function: str = ""
    """The agent: `module:function` or `path/to/file.py:function`, plain or async."""
    tool_call_parser: ToolCallParser = "hermes"
    """How the model writes a call of a tool that the agent's requests offer; see `rollout.multi_turn`."""
    workers: int = 4
    """Number of episodes that each rollout worker runs at once, each in a process of its own."""
    timeout_s: float = 600.0
    """Maximum seconds of one episode; then its process is ended and the sample is masked, because a slow machine is not the model's fault."""
    start_deadline_s: float = 60.0
    """Maximum seconds for a process to load the agent."""

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        where, colon, name = self.function.rpartition(":")
        if not (colon and where and name.isidentifier()):
            raise UserError(f"'rollout.agent.function' is '{self.function}'; it must be of the form module:function or path/to/file.py:function")
        check_at_least_one("rollout.agent", self, "workers")
        check_seconds("rollout.agent", self, "timeout_s", "start_deadline_s")


def check_agent(recipe: "Recipe") -> None:
    """Checks what episodes of an agent cannot be combined with."""
    rollout = recipe.rollout
    if rollout.agent is None:
        if any(function.function == "agent" for function in recipe.rewards.functions):
            raise UserError("reward function 'agent' is the number that an agent returned, and section 'rollout.agent' is not given; name another function")
        return
    if rollout.multi_turn is not None:
        raise UserError("'rollout.agent' with rollout.multi_turn: an agent runs its tools itself; remove one of the two")
    if rollout.budget_tokens:
        raise UserError(
            "'rollout.budget_tokens' with rollout.agent: an episode cannot wait in the replay buffer between two requests; remove one of the two"
        )
    if recipe.algorithm.learns_from_pairs:
        raise UserError("'rollout.agent' with algorithm.name online_dpo: an episode may have several branches, and a pair has one; use grpo")
    if rollout.agent.timeout_s >= recipe.machine.call_deadline_s:
        raise UserError(
            f"'rollout.agent.timeout_s' is {rollout.agent.timeout_s:g} and machine.call_deadline_s {recipe.machine.call_deadline_s:g}, after which a whole "
            "rollout counts as stuck; lower timeout_s or raise call_deadline_s"
        )
    if recipe.reward_model.path:
        raise UserError("'rollout.agent' with section 'reward_model', which reads one token sequence, and an episode may have several; remove one of them")
