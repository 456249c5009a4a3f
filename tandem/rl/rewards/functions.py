"""User-defined reward functions by import path, with the signatures of TRL and verl.

TRL (``GRPOTrainer``, ``reward_funcs``): ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, plain or async. verl
(``custom_reward_function``): ``compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict`` with key
``score``.
"""

import asyncio
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tandem.config.rewards import RewardFunctionConfig
from tandem.rl.rewards.judgement import (
    Item,
    Judge,
    Judgement,
    checked_number,
    describe,
    infrastructure_fault,
    number,
    shortened,
)
from tandem.types import UserError

Signature = Literal["trl", "verl"]


def user_judge(config: RewardFunctionConfig) -> Judge:
    """Returns the judge for an import path. Raises ``UserError`` if it cannot be loaded or called."""
    function = load_function(config.function)
    signature = config.signature if config.signature != "auto" else detect_signature(function, config.function)
    _check_arguments(function, config)
    if signature == "trl":
        return Judge(config.label, True, lambda items: call_trl(function, items, config.arguments), reads_ids=True)
    return Judge(config.label, False, lambda items: [call_verl(function, item, config.arguments) for item in items])


def load_function(path: str) -> Callable[..., Any]:
    """Returns the function at ``module:function`` or ``path/to/file.py:function``. Raises ``UserError``."""
    where, _, name = path.rpartition(":")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") or "/" in where else importlib.import_module(where)
    except UserError:
        raise
    except BaseException as error:  # a module may raise anything, SystemExit too, when it is imported
        raise UserError(f"reward function '{path}' cannot be loaded: {describe(error)}") from error
    function = getattr(module, name, None)
    if function is None:
        functions = [n for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_")]
        has = f"it has {', '.join(functions)}" if functions else "it has no function"
        raise UserError(f"reward function '{path}': '{where}' has no '{name}'; {has}")
    if not callable(function):
        raise UserError(f"reward function '{path}': '{name}' is {shortened(function)}, which cannot be called")
    return function  # type: ignore[no-any-return]


def detect_signature(function: Callable[..., Any], path: str) -> Signature:
    """Returns the signature that the parameters' names match. Raises ``UserError`` if they match none."""
    names = _parameters(function)
    if {"solution_str", "data_source"} & set(names):
        return "verl"
    if {"completions", "prompts", "completion_ids"} & set(names):
        return "trl"
    raise UserError(
        f"reward function '{path}' has the parameters ({', '.join(names)}); name them as TRL does (prompts, completions, **columns) or "
        "as verl does (data_source, solution_str, ground_truth, extra_info), or set 'signature: trl' or 'signature: verl'"
    )


def call_trl(function: Callable[..., Any], items: Sequence[Item], arguments: Mapping[str, Any]) -> list[Judgement]:
    """Makes one call for all ``items``. Raises what the function raises, and ``ValueError`` for a result of another length or type; a
    single invalid value is a fault of its sample only."""
    columns = dict.fromkeys(name for item in items for name in item.columns)
    known: dict[str, Any] = {name: [item.columns.get(name) for item in items] for name in columns}
    known.setdefault("ground_truth", [item.ground_truth for item in items])
    known.update(arguments)
    known["prompts"] = [item.prompt for item in items]
    known["completions"] = [item.completion for item in items]
    known["completion_ids"] = [list(item.completion_ids) for item in items]
    result = function(**_accepted(function, known))
    if inspect.isawaitable(result):
        result = asyncio.run(_wait_for(result))
    if isinstance(result, str | bytes | Mapping) or not hasattr(result, "__len__") or not hasattr(result, "__iter__"):
        raise ValueError(f"it returned {type(result).__name__} {shortened(result)} instead of a list of numbers")
    if len(result) != len(items):
        raise ValueError(f"it returned {len(result)} values for {len(items)} samples")
    return [_judged(value) for value in result]


def call_verl(function: Callable[..., Any], item: Item, arguments: Mapping[str, Any]) -> Judgement:
    """Makes one call for one item. Raises what the function raises. In a dict, ``score`` is the value, ``acc`` says whether the sample is
    correct and other numbers are details."""
    extra_info = item.columns.get("extra_info")
    known: dict[str, Any] = {
        **arguments,
        "data_source": item.columns.get("data_source", item.task),
        "solution_str": item.completion,
        "ground_truth": item.ground_truth,
        "extra_info": extra_info if isinstance(extra_info, dict) else dict(item.columns),
    }
    result = function(**_accepted(function, known))
    if inspect.isawaitable(result):
        result = asyncio.run(_wait_for(result))
    if not isinstance(result, Mapping):
        return _judged(result)
    if "score" not in result:
        return infrastructure_fault(f"it returned a dict with the keys {', '.join(map(repr, result))} and without 'score'")
    judgement = _judged(result["score"])
    if judgement.value is None:
        return judgement
    details = {str(key): value for key, value in result.items() if key not in ("score", "acc") and _is_number(value)}
    correct = bool(checked_number(result["acc"]) > 0) if _is_number(result.get("acc")) else None
    return number(judgement.value, correct=correct, details={key: checked_number(value) for key, value in details.items()})


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


async def _wait_for(result: Any) -> Any:
    return await result


def _load_file(file: Path) -> Any:
    if not file.is_file():
        raise UserError(f"reward function file '{file}' does not exist; paths are relative to where the command is run")
    name = f"tandem_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"reward function file '{file}' is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.resolve().parent))  # so that it can import modules in its own folder
    spec.loader.exec_module(module)
    return module


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _accepted(function: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of ``known`` that the function has a parameter for."""
    parameters = _parameters(function)
    if not parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(known)
    return {name: value for name, value in known.items() if name in parameters}


def _check_arguments(function: Callable[..., Any], config: RewardFunctionConfig) -> None:
    parameters = _parameters(function)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for name in config.arguments:
        if name not in parameters:
            raise UserError(
                f"'arguments' of reward function '{config.label}' contains '{name}', which is not a parameter of it; its parameters are {', '.join(parameters)}"
            )
