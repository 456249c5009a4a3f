"""User-defined reward functions by import path, with the signatures of TRL and verl.

TRL (``GRPOTrainer``, ``reward_funcs``): ``f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns) -> list[float | None]``,
plain or async; for prompts that are messages, a completion is a list of one message. verl (``custom_reward_function``): ``compute_score(data_source,
solution_str, ground_truth, extra_info=None) -> float | dict`` with key ``score``.
"""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from tandem.config.rewards import INFERRED_COLUMNS, RewardFunctionConfig
from tandem.rl.rewards.judgement import (
    NO_STATE,
    Item,
    Judge,
    JudgeCall,
    Judgement,
    JudgeResult,
    Scope,
    TrainerState,
    checked_number,
    infrastructure_fault,
    not_applicable,
    number,
    shortened,
)
from tandem.runtime.import_path import load_function
from tandem.runtime.parameters import accepted, needed, parameters_of, takes_any
from tandem.types import UserError

Signature = Literal["trl", "verl"]
TRL_ARGUMENTS = ("prompts", "completions", "completion_ids", "ground_truth", "trainer_state", "log_extra", "log_metric")
"""What every function of TRL's signature may take besides the columns."""


def user_judge(config: RewardFunctionConfig) -> Judge:
    """Returns the judge for an import path. Raises ``UserError`` if it cannot be loaded or called."""
    function, file = load_function(config.function, "reward function")
    signature = config.signature if config.signature != "auto" else detect_signature(function, config.function)
    _check_arguments(function, config)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    if signature == "trl":
        inferred = [INFERRED_COLUMNS[model] for model in config.needs]
        scope: Scope = "group" if config.scope == "auto" else config.scope
        return Judge(
            config.label, True, _each_scope(scope, lambda items, call: call_trl(function, items, config.arguments, call.state)), reads_ids=True,
            is_async=is_async, file=file, columns=needed(function, {*TRL_ARGUMENTS, *config.arguments, *inferred}), scope=scope,
        )  # fmt: skip
    if config.scope not in ("auto", "sample"):
        raise UserError(f"'scope' of reward function '{config.label}' is {config.scope}, and verl's signature takes one sample; remove it")
    # Asynchronous calls wait for each other's servers, so all are made at once; of the others each is timed by itself.
    return Judge(config.label, is_async, lambda items, call: call_verl(function, items, config.arguments), is_async=is_async, file=file)


def _each_scope(scope: Scope, called: Callable[[Sequence[Item], JudgeCall], JudgeResult]) -> Callable[[Sequence[Item], JudgeCall], JudgeResult]:
    """Returns the judge that makes a call for each part of its items that one call is to see, and awaits all of them together."""

    def judge(items: Sequence[Item], call: JudgeCall) -> JudgeResult:
        of = lambda item: {"sample": item.sample_id, "group": item.group, "batch": ""}[scope]
        parts = [list(part) for _, part in groupby(items, of)]
        results = [called(part, call) for part in parts]
        return _gathered(results) if any(map(inspect.isawaitable, results)) else [judgement for result in results for judgement in result]  # type: ignore[union-attr]

    return judge


async def _gathered(results: Sequence[JudgeResult]) -> list[Judgement]:
    return [judgement for part in await asyncio.gather(*results) for judgement in part]  # type: ignore[arg-type]


def detect_signature(function: Callable[..., Any], path: str) -> Signature:
    """Returns the signature that the parameters' names match. Raises ``UserError`` if they match none."""
    names = parameters_of(function)
    if {"solution_str", "data_source"} & set(names):
        return "verl"
    if {"completions", "prompts", "completion_ids"} & set(names):
        return "trl"
    raise UserError(
        f"reward function '{path}' has the parameters ({', '.join(names)}); name them as TRL does (prompts, completions, **columns) or "
        "as verl does (data_source, solution_str, ground_truth, extra_info), or set 'signature: trl' or 'signature: verl'"
    )


def call_trl(
    function: Callable[..., Any], items: Sequence[Item], arguments: Mapping[str, Any], state: TrainerState = NO_STATE
) -> JudgeResult:
    """Makes one call for all ``items``; the result of an asynchronous function has to be awaited. Raises what the function raises, and ``ValueError`` for a
    result of another length or type; a single invalid value is a fault of its sample only, and ``None`` means that the function does not apply to it."""
    columns = dict.fromkeys(name for item in items for name in item.columns)
    known: dict[str, Any] = {name: [item.columns.get(name) for item in items] for name in columns}
    known.setdefault("ground_truth", [item.ground_truth for item in items])
    logged = _Logged(len(items))
    known |= {"trainer_state": state, "log_extra": logged.log_extra, "log_metric": logged.log_metric}
    known.update(arguments)
    known["prompts"] = [list(item.messages) if item.messages else item.prompt for item in items]
    known["completions"] = [_completion(item) for item in items]
    known["completion_ids"] = [list(item.completion_ids) for item in items]
    result = function(**accepted(function, known))
    return _awaited_trl(result, logged) if inspect.isawaitable(result) else _of_trl(result, logged)


def _completion(item: Item) -> str | list[Any]:
    """Returns the completion as TRL gives it: messages for an episode and for a prompt of messages, else the text."""
    if item.turns:
        return list(item.turns)
    return [{"role": "assistant", "content": item.completion}] if item.messages else item.completion


async def _awaited_trl(result: Awaitable[Any], logged: "_Logged") -> list[Judgement]:
    return _of_trl(await result, logged)


def _of_trl(result: Any, logged: "_Logged") -> list[Judgement]:
    if isinstance(result, str | bytes | Mapping) or not hasattr(result, "__len__") or not hasattr(result, "__iter__"):
        raise ValueError(f"it returned {type(result).__name__} {shortened(result)} instead of a list of numbers")
    if len(result) != logged.count:
        raise ValueError(f"it returned {len(result)} values for {logged.count} samples")
    return [logged.with_logs(not_applicable() if value is None else _judged(value), place) for place, value in enumerate(result)]


@dataclass(slots=True)
class _Logged:
    """What a function of TRL's signature logs in one call for ``count`` samples."""

    count: int
    metrics: dict[str, float] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: float) -> None:
        """Logs a number of the whole call: every sample has it, so that its mean over a step weighs calls by their samples."""
        self.metrics[str(name)] = checked_number(value)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Logs a value for each sample."""
        if len(values) != self.count:
            raise ValueError(f"log_extra('{column}', ...) has {len(values)} values for {self.count} samples")
        self.columns[str(column)] = [_plain(value) for value in values]

    def with_logs(self, judgement: Judgement, place: int) -> Judgement:
        return replace(judgement, details=self.metrics, extra={name: values[place] for name, values in self.columns.items()})


def _plain(value: Any) -> Any:
    """Returns a JSON value: numbers of other libraries as Python's, everything else as text."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return checked_number(value) if _is_number(value) else str(value)
    return value


def call_verl(function: Callable[..., Any], items: Sequence[Item], arguments: Mapping[str, Any]) -> JudgeResult:
    """Makes one call for each item; the results of an asynchronous function have to be awaited. Raises what the function raises. In a dict, ``score`` is
    the value, ``acc`` says whether the sample is correct, other numbers are details and other values extra."""
    results = [function(**_verl_arguments(function, item, arguments)) for item in items]
    return _awaited_verl(results) if any(map(inspect.isawaitable, results)) else [_of_verl(result) for result in results]


async def _awaited_verl(results: Sequence[Awaitable[Any]]) -> list[Judgement]:
    return [_of_verl(result) for result in await asyncio.gather(*results)]


def _verl_arguments(function: Callable[..., Any], item: Item, arguments: Mapping[str, Any]) -> dict[str, Any]:
    extra_info = item.columns.get("extra_info")
    known: dict[str, Any] = {
        **arguments,
        "data_source": item.columns.get("data_source", item.task),
        "solution_str": item.completion,
        "ground_truth": item.ground_truth,
        "extra_info": extra_info if isinstance(extra_info, dict) else dict(item.columns),
    }
    known |= {name: item.columns[name] for name in INFERRED_COLUMNS.values() if name in item.columns}
    return accepted(function, known)


def _of_verl(result: Any) -> Judgement:
    if not isinstance(result, Mapping):
        return _judged(result)
    if "score" not in result:
        return infrastructure_fault(f"it returned a dict with the keys {', '.join(map(repr, result))} and without 'score'")
    judgement = _judged(result["score"])
    if judgement.value is None:
        return judgement
    others = {str(key): value for key, value in result.items() if key not in ("score", "acc")}
    details = {key: checked_number(value) for key, value in others.items() if _is_number(value)}
    extra = {key: _plain(value) for key, value in others.items() if key not in details and value is not None}
    correct = bool(checked_number(result["acc"]) > 0) if _is_number(result.get("acc")) else None
    return Judgement(judgement.state, judgement.value, correct=correct, details=details, extra=extra)


def _judged(value: Any) -> Judgement:
    try:
        return number(checked_number(value))
    except ValueError as error:
        return infrastructure_fault(str(error))


def _is_number(value: Any) -> bool:
    try:
        checked_number(value)
    except ValueError:
        return False
    return True


def _check_arguments(function: Callable[..., Any], config: RewardFunctionConfig) -> None:
    parameters = parameters_of(function)
    for name in config.arguments:
        if name not in parameters and not takes_any(function):
            raise UserError(
                f"'arguments' of reward function '{config.label}' contains '{name}', which is not a parameter of it; its parameters are {', '.join(parameters)}"
            )
