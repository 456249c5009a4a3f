"""A score and its states. A broken environment is never a reward of 0."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class ScoreState(StrEnum):
    """``NUMBER``: the reward is ``value``. ``MODEL_FAULT``: the sample itself is at fault (it does not parse, its code
    does not run); ``value`` is the reward for that. ``INFRASTRUCTURE_FAULT``: the judge is at fault (it raised, hung or
    gave no finite number); there is no reward and the sample is masked. ``NOT_APPLICABLE``: every function returned ``None``, that it does not apply to
    this sample; it is masked too, and nothing is at fault."""

    NUMBER = "number"
    MODEL_FAULT = "model_fault"
    INFRASTRUCTURE_FAULT = "infrastructure_fault"
    NOT_APPLICABLE = "not_applicable"

    @property
    def has_value(self) -> bool:
        """Whether a score in this state is a reward."""
        return self in (ScoreState.NUMBER, ScoreState.MODEL_FAULT)


@dataclass(frozen=True, slots=True)
class Score:
    """The judgement of one sample.

    ``value`` is ``None`` exactly when ``state`` has no value. ``components`` has the unweighted value of each reward function that applies, by its name,
    ``correct`` what counts as accuracy (``None``: no function of the composition says), ``reason`` one line for a person. ``extra``: JSON values that
    reward functions logged for this sample, by name.
    """

    sample_id: str
    state: ScoreState
    value: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    correct: bool | None = None
    reason: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert (self.value is None) == (not self.state.has_value), self
