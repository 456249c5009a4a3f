"""Messages between the reward pool and its workers, as the meta of frames."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.rl.rewards.judgement import Item, Judgement, Scope
from tandem.types import ScoreState


@dataclass(frozen=True, slots=True)
class Loaded:
    """The answer to ``load``: for each reward function, whether it is batched, whether it reads token ids, whether it is awaited together with others and
    what one call of it sees; the columns that it cannot do without, and the digest of each file that defines one."""

    batched: list[bool]
    reads_ids: list[bool]
    is_async: list[bool]
    scopes: list[Scope]
    columns: list[list[str]]
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class JudgeRequest:
    """The call ``judge``: ``items`` for the reward functions with the indices ``judges``, as made by ``items_to_json``. ``state``: a ``TrainerState``;
    ``limit_s``: seconds until the process is ended."""

    judges: list[int]
    items: list[Any]
    state: list[Any]
    limit_s: float


@dataclass(frozen=True, slots=True)
class JudgeAnswer:
    """The answer to ``judge``, for each function: ``judgements`` as made by ``judgements_to_json``, or the function's exception in one line in
    ``errors``, which is empty otherwise."""

    judgements: list[Any]
    errors: list[str]


def items_to_json(items: Sequence[Item], completion_ids: bool) -> list[Any]:
    """Returns items as JSON data. ``completion_ids``: includes them; most judges do not read them, and they are the bulk of a long
    sample."""
    return [
        [
            *item[:3], list(item.completion_ids) if completion_ids else [], item.ground_truth, item.task, dict(item.columns), list(item.messages),
            item.group, list(item.turns), item.length, item.correct, dict(item.outcome),
        ]
        for item in items
    ]


def items_from_json(data: list[Any]) -> list[Item]:
    return [Item(*fields) for fields in data]


def judgements_to_json(judgements: Sequence[Judgement]) -> list[Any]:
    return [[j.state.value, j.value, j.reason, j.correct, dict(j.details), dict(j.extra)] for j in judgements]


def judgements_from_json(data: list[Any]) -> list[Judgement]:
    return [Judgement(ScoreState(state), value, reason, correct, details, extra) for state, value, reason, correct, details, extra in data]
