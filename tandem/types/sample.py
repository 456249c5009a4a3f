"""A sample: one completion of a prompt with everything the trainer needs to know of how it was drawn."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from tandem.types.routed_experts import RoutedExperts

REWARD = "reward"
"""The number of ``Sample.outcome`` that is its reward."""


class WeightVersion(NamedTuple):
    """Which weights: the trainer's ``incarnation`` (how often it was started in this run) and the optimizer ``step``.

    Two incarnations that reach the same step hold the same bits in deterministic mode, but a version that a dead
    incarnation left behind can never be taken for a live one.
    """

    incarnation: int
    step: int


class FinishReason(StrEnum):
    """Why a completion ended, with the names that OpenAI's API and vLLM use. ``REPETITION``: it repeated itself and was ended before its limit."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REPETITION = "repetition"


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion.

    ``id`` is ``"{step}/{prompt_id}/{index}"``, with ``index`` the place in the prompt's group. The per-token fields have
    ``len(token_ids)`` entries; the end-of-sequence token, where one was drawn, is among ``token_ids``.

    ``logprobs``: raw log-probability in nats (temperature 1, nothing filtered) under the weights of ``weight_versions``.
    ``sampling_logprobs``: log-probability under the distribution the token was drawn from (after temperature, top-k,
    top-p, min-p and bias).
    ``response_mask``: True where the model sampled the token, False for an observation, which a tool or the chat template wrote between
    two turns; empty if all tokens were sampled. An observation has the log-probabilities 0.0 and no weight version, and counts in no loss,
    mismatch, entropy or length.
    ``messages``: an episode of several turns as the messages after its prompt, of which ``text`` is the last one's content; empty for a completion.
    ``fault``: why the environment broke the sample, which is masked; empty if it did not.
    ``outcome``: the numbers that an agent returned for its episode: ``reward`` and others by their names; empty if it returned none.
    ``branches``: of an episode whose history an agent rewrote, the other token sequences that it has, each with the id ``"{id}/{number}"`` and none of its
    own. They are trained with the reward of this sample; ``text``, ``fault`` and ``finish_reason`` are the episode's in all of them. A token that was sampled
    is ``True`` in the ``response_mask`` of one of them.
    ``routed_experts``: of the tokens of prompt and completion, for a trainer that replays the routing of another engine; ``None`` if nothing is replayed.
    """

    id: str
    prompt_id: str
    index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampling_logprobs: tuple[float, ...]
    weight_versions: tuple[WeightVersion | None, ...]
    finish_reason: FinishReason
    text: str
    response_mask: tuple[bool, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    fault: str = ""
    outcome: Mapping[str, float] = field(default_factory=dict)
    branches: tuple["Sample", ...] = ()
    routed_experts: RoutedExperts | None = None

    @property
    def sequences(self) -> tuple["Sample", ...]:
        """Returns the sample and its branches: what is trained."""
        return (self, *self.branches)

    @property
    def is_truncated(self) -> bool:
        """Whether the completion was cut off: at the token limit, or because it repeated itself."""
        return self.finish_reason in (FinishReason.LENGTH, FinishReason.REPETITION)

    @property
    def is_sampled(self) -> tuple[bool, ...]:
        """Returns ``response_mask`` with an entry for every token."""
        return self.response_mask or (True,) * len(self.token_ids)

    @property
    def sampled_tokens(self) -> int:
        """Returns the number of tokens that the model sampled: the length of the response."""
        return sum(self.response_mask) if self.response_mask else len(self.token_ids)

    @property
    def sampled_weight_versions(self) -> list[WeightVersion]:
        """Returns the weight version of each sampled token."""
        return [version for version in self.weight_versions if version is not None]
