"""A score and its three states. A broken environment is never a reward of 0."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class ScoreState(StrEnum):
    """``NUMBER``: the reward is ``value``. ``MODEL_FAULT``: the sample itself is at fault (it does not parse, its code
    does not run); ``value`` is the reward for that. ``INFRASTRUCTURE_FAULT``: the judge is at fault (it raised, hung or
    gave no finite number); there is no reward and the sample is masked."""

    NUMBER = "number"
    MODEL_FAULT = "model_fault"
    INFRASTRUCTURE_FAULT = "infrastructure_fault"


@dataclass(frozen=True, slots=True)
class Score:
    """The judgement of one sample.

    ``value`` is ``None`` exactly when ``state`` is ``INFRASTRUCTURE_FAULT``. ``components`` has the unweighted value of
    each reward function by its name, ``correct`` what counts as accuracy (``None``: no function of the composition
    says), ``reason`` one line for a person.
    """

    sample_id: str
    state: ScoreState
    value: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    correct: bool | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        assert (self.value is None) == (self.state is ScoreState.INFRASTRUCTURE_FAULT), self
