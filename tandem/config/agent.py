"""Section ``rollout.agent``: episodes of an agent that was not written for training, which calls the model over HTTP."""

from dataclasses import dataclass

from tandem.config.limits import check_at_least_one, check_seconds
from tandem.config.multi_turn import ToolCallParser
from tandem.types.errors import UserError


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
