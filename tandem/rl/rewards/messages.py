"""Messages between the reward pool and its workers, as the meta of frames."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.rl.rewards.judgement import Item, Judgement
from tandem.types import ScoreState


@dataclass(frozen=True, slots=True)
class Loaded:
    """The answer to ``load``: for each reward function, whether it is batched and whether it reads token ids."""

    batched: list[bool]
    reads_ids: list[bool]


@dataclass(frozen=True, slots=True)
class JudgeRequest:
    """The call ``judge``: ``items`` for the reward function with index ``judge``, as made by ``items_to_json``."""

    judge: int
    items: list[Any]


@dataclass(frozen=True, slots=True)
class JudgeAnswer:
    """The answer to ``judge``: ``judgements`` as made by ``judgements_to_json``, or ``error``, the function's exception in one line."""

    judgements: list[Any]
    error: str = ""


def items_to_json(items: Sequence[Item], completion_ids: bool) -> list[Any]:
    """Returns items as JSON data. ``completion_ids``: includes them; most judges do not read them, and they are the bulk of a long
    sample."""
    return [
        [*item[:3], list(item.completion_ids) if completion_ids else [], item.ground_truth, item.task, dict(item.columns)] for item in items
    ]


def items_from_json(data: list[Any]) -> list[Item]:
    return [Item(*fields) for fields in data]


def judgements_to_json(judgements: Sequence[Judgement]) -> list[Any]:
    return [[j.state.value, j.value, j.reason, j.correct, dict(j.details)] for j in judgements]


def judgements_from_json(data: list[Any]) -> list[Judgement]:
    return [Judgement(ScoreState(state), value, reason, correct, details) for state, value, reason, correct, details in data]
