"""A sample: one completion of a prompt with everything the trainer needs to know of how it was drawn."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class WeightVersion(NamedTuple):
    """Which weights: the trainer's ``incarnation`` (how often it was started in this run) and the optimizer ``step``.

    Two incarnations that reach the same step hold the same bits in deterministic mode, but a version that a dead
    incarnation left behind can never be taken for a live one.
    """

    incarnation: int
    step: int


class FinishReason(StrEnum):
    """Why a completion ended, with the names that OpenAI's API uses."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion.

    ``id`` is ``"{step}/{prompt_id}/{index}"``, with ``index`` the place in the prompt's group. The per-token fields have
    ``len(token_ids)`` entries; the end-of-sequence token, where one was drawn, is among ``token_ids``.

    ``logprobs``: raw log-probability in nats (temperature 1, nothing filtered) under the weights of ``weight_versions``.
    ``sampling_logprobs``: log-probability under the distribution the token was drawn from (after temperature, top-k,
    top-p, min-p and bias).
    """

    id: str
    prompt_id: str
    index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampling_logprobs: tuple[float, ...]
    weight_versions: tuple[WeightVersion, ...]
    finish_reason: FinishReason
    text: str
