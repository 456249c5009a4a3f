"""Adds the scores of a reward model to those of the reward functions."""

import math
from collections.abc import Sequence
from dataclasses import replace

from tandem.types import Score, ScoreState

REWARD_MODEL = "reward_model"
"""The name of its component."""


def with_model_scores(scores: Sequence[Score], model_scores: Sequence[float], weight: float) -> list[Score]:
    """Returns ``scores`` with ``weight`` times the reward model's number of each sample added, and that number as a component.

    A sample that a fault of the infrastructure masks stays masked. One to which no reward function applies has the model's reward alone. A number that is
    not finite is a fault of the infrastructure."""
    return [_with_model_score(score, value, weight) for score, value in zip(scores, model_scores, strict=True)]


def _with_model_score(score: Score, value: float, weight: float) -> Score:
    if score.state is ScoreState.INFRASTRUCTURE_FAULT:
        return score
    if not math.isfinite(value):
        return replace(score, state=ScoreState.INFRASTRUCTURE_FAULT, value=None, reason=f"the reward model gave {value} for sample '{score.sample_id}'")
    state = ScoreState.NUMBER if score.state is ScoreState.NOT_APPLICABLE else score.state
    return replace(score, state=state, value=(score.value or 0.0) + weight * value, components={**score.components, REWARD_MODEL: value})
