"""Section ``rollout.multi_turn``: episodes of several turns, in which the model calls the tools of ``task.tools``."""

from dataclasses import dataclass
from typing import Literal

from tandem.config.limits import check_at_least_one, check_seconds

ToolCallParser = Literal[
    "hermes", "llama3_json", "mistral", "pythonic", "llama4_pythonic", "deepseek_v3", "deepseek_v31", "kimi_k2", "granite", "granite4", "phi4_mini_json",
    "olmo3", "cohere_command3", "openai",
]  # fmt: skip
"""The formats of ``tandem serve`` in which a call has the types of its arguments."""


@dataclass(frozen=True, slots=True)
class MultiTurnConfig:
    """Episodes of several turns: the model calls tools of `task.tools` and reads their results until it answers without a call. `rollout.max_tokens` is
    the maximum length of a whole episode, results included."""

    max_turns: int = 8
    """Maximum number of the model's turns. An episode whose last turn still calls a tool is truncated, as at `rollout.max_tokens`."""
    tool_call_parser: ToolCallParser = "hermes"
    """How the model writes a call, with vLLM's names. `hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen);
    `llama3_json`: `{"name": ..., "parameters": {...}}`; `mistral`: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`; `pythonic`: `[name(key=value)]`;
    the others as in the table of `docs/serving.md`."""
    observation_role: Literal["tool", "user"] = "tool"
    """The role in which the chat template shows results. `user`: for a template that knows no tools."""
    max_tool_response_tokens: int = 256
    """Maximum tokens of one result."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Which part of a longer result is left out."""
    tool_timeout_s: float = 10.0
    """Maximum seconds of one call; then its process is ended and the sample is masked, because a slow machine is not the model's fault."""
    tool_workers: int = 1
    """Number of processes that run tools."""
    tool_start_deadline_s: float = 60.0
    """Maximum seconds for such a process to load the tools."""

    def check(self) -> None:
        """Raises ``UserError`` for an invalid value."""
        check_at_least_one("rollout.multi_turn", self, "max_turns", "max_tool_response_tokens", "tool_workers")
        check_seconds("rollout.multi_turn", self, "tool_timeout_s", "tool_start_deadline_s")
