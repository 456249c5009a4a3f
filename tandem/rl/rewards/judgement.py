"""The input and the output of a reward function."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from tandem.types import ScoreState
from tandem.types.one_line import describe as describe
from tandem.types.one_line import one_line as one_line
from tandem.types.one_line import shortened as shortened

Scope = Literal["sample", "group", "batch"]
"""What one call of a reward function sees: one sample, the samples of one prompt, or all of a step."""


class Item(NamedTuple):
    """One sample as a judge receives it. ``completion``: its text; ``prompt``: the text that the model read; ``messages``: the prompt as a conversation, if
    its row has one; ``group``: the prompt's id; ``turns``: an episode as the messages after its prompt, of which ``completion`` is the last one's content;
    ``length``: tokens that the model sampled; ``correct``: what the accuracy function says, if it was called for an earlier scope; ``outcome``: the numbers
    that an agent returned, as in ``Sample``."""

    sample_id: str
    prompt: str
    completion: str
    completion_ids: Sequence[int]
    ground_truth: Any
    task: str
    columns: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]] = ()
    group: str = ""
    turns: Sequence[Mapping[str, Any]] = ()
    length: int = 0
    correct: bool | None = None
    outcome: Mapping[str, float] = MappingProxyType({})


class TrainerState(NamedTuple):
    """Where the run is, for reward functions, under the names of transformers' ``TrainerState``. ``epoch``: passes over the prompts, 0 where they are
    generated."""

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


NO_STATE = TrainerState()
"""Of samples that are not of a step of a run."""


class JudgeCall(NamedTuple):
    """What a judge knows besides its items. ``limit_s``: seconds until its process is ended."""

    state: TrainerState = NO_STATE
    limit_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Judgement:
    """One judge's result for one sample, with the states of a ``Score``. ``correct``: set if the judge reports it. ``details``: further
    numbers, by name. ``extra``: further JSON values, by name."""

    state: ScoreState
    value: float | None
    reason: str = ""
    correct: bool | None = None
    details: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


JudgeResult = list[Judgement] | Awaitable[list[Judgement]]


@dataclass(frozen=True, slots=True)
class Judge:
    """A reward function. ``judge`` maps items to judgements in the same order, or raises, and may have to be awaited. ``batched``: it takes many items at
    once, otherwise one at a time. ``reads_ids``: it reads ``completion_ids``, which are empty otherwise. ``is_async``: it is awaited together with the
    other functions that are. ``file``: the file that defines it, empty for a built-in one. ``columns``: those that it cannot do without. ``scope``: what it has
    to see at once; several of them may be in one call."""

    label: str
    batched: bool
    judge: Callable[[Sequence[Item], JudgeCall], JudgeResult]
    reads_ids: bool = False
    is_async: bool = False
    file: str = ""
    columns: tuple[str, ...] = ()
    scope: Scope = "sample"


def number(value: float, *, correct: bool | None = None, details: Mapping[str, float] | None = None) -> Judgement:
    return Judgement(ScoreState.NUMBER, value, correct=correct, details=details or {})


def model_fault(value: float, reason: str) -> Judgement:
    return Judgement(ScoreState.MODEL_FAULT, value, one_line(reason), correct=False)


def infrastructure_fault(reason: str) -> Judgement:
    return Judgement(ScoreState.INFRASTRUCTURE_FAULT, None, one_line(reason))


def not_applicable() -> Judgement:
    return Judgement(ScoreState.NOT_APPLICABLE, None)


def checked_number(value: Any) -> float:
    """Returns ``value`` as a finite float. Raises ``ValueError`` that describes what it is instead."""
    if value is None:
        raise ValueError("it returned None instead of a number")
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        raise ValueError(f"it returned {type(value).__name__} {shortened(value)} instead of a number")
    try:
        number = float(value)
    except Exception as error:
        raise ValueError(f"it returned {type(value).__name__} {shortened(value)}, which is not a number: {error}") from None
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}")
    return number
