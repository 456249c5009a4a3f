"""The calls of the model in an episode of an agent, and the trajectories that they form.

A call whose messages begin with those of an earlier one and its answer continues it: its prompt is the earlier prompt, the tokens that were sampled and
what the agent has added, by their ids. Any other call begins with the tokens of its whole conversation. So the calls form a forest. Of the calls
that continue the same one, one continues its token sequence and the others begin sequences (branches) of their own, in which everything before them is
prompt. A token that was sampled is therefore learned in exactly one sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.text.tool_turns import Call
from tandem.types import RoutedExperts, WeightVersion


@dataclass(frozen=True, slots=True, eq=False)
class ModelCall:
    """One call. ``messages``, ``tools``: what the agent sent; ``answer``: the message it received, with the calls of tools ``tool_calls``. ``prompt``,
    ``token_ids``: what the model read and sampled, with the log-probabilities and versions of ``Sample``. ``parent``: the call that it continues.
    ``number``: the order in which the calls ended. ``stop_text``: the stop text that ended it. ``is_text``: the agent sent and received plain text, or token
    ids, and no messages. ``routed_experts``: of the completion."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    answer: Mapping[str, Any]
    tool_calls: Sequence[Call]
    prompt: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    sampling_logprobs: Sequence[float]
    weight_versions: Sequence[WeightVersion]
    finish_reason: str
    text: str
    parent: "ModelCall | None"
    number: int
    stop_text: str | None = None
    is_text: bool = False
    routed_experts: RoutedExperts | None = None

    @property
    def read(self) -> list[int]:
        """Returns prompt and sampled tokens."""
        return [*self.prompt, *self.token_ids]


@dataclass(slots=True)
class Trajectory:
    """A sequence of ``calls``, each of which continues the one before it."""

    calls: list[ModelCall] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        """Returns the prompt of the first call."""
        return list(self.calls[0].prompt)

    @property
    def new_messages(self) -> list[Mapping[str, Any]]:
        """Returns the conversation after the first call's messages, the last answer included."""
        return [*self.calls[-1].messages[len(self.calls[0].messages) :], self.calls[-1].answer]


def trajectories(calls: Sequence[ModelCall]) -> list[Trajectory]:
    """Returns the trajectories of an episode: first the one with the call that ended last, then the others by their token ids. Which of several calls
    continues the sequence of their common parent depends on their tokens, not on the time at which they were made."""
    order = lambda call: (list(call.prompt), list(call.token_ids))
    heirs: dict[ModelCall, ModelCall] = {}
    for call in sorted((call for call in calls if call.parent is not None), key=order):
        assert call.parent is not None
        heirs.setdefault(call.parent, call)
    continuing = set(heirs.values())
    formed = []
    for first in (call for call in calls if call not in continuing):
        trajectory = Trajectory([first])
        while (heir := heirs.get(trajectory.calls[-1])) is not None:
            trajectory.calls.append(heir)
        formed.append(trajectory)
    last = max(calls, key=lambda call: call.number)
    return sorted(formed, key=lambda one: (last not in one.calls, order(one.calls[-1])))
