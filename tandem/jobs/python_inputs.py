"""Reward functions and a dataset that a Python program hands to ``train``: written to the run's folder where no file has them yet, so that the run resumes,
replays and verifies without the program."""

import contextlib
import importlib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from tandem.config.load import build
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import AnyRecipe
from tandem.config.rewards import RewardFunctionConfig
from tandem.config.task import TaskConfig
from tandem.runtime.process.temporary import temporary_folder
from tandem.types import UserError

HELD_OUT = ("test", "validation", "eval")
"""Splits of a ``DatasetDict`` that serve evaluations, the first that it has."""

RewardFunction = Callable[..., Any] | str | RewardFunctionConfig
Rewards = RewardFunction | Sequence[RewardFunction | tuple[RewardFunction, float]]


@dataclass(frozen=True)
class PythonInputs:
    """``files``: contents by name, and ``recipe_in``, the recipe that names them in a folder."""

    files: Mapping[str, bytes]
    recipe_in: Callable[[Path], AnyRecipe]

    def write(self, folder: Path) -> AnyRecipe:
        """Writes the files to ``folder`` and returns the recipe with their paths."""
        if self.files:
            folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return self.recipe_in(folder.resolve() if self.files else folder)


def python_inputs(recipe: AnyRecipe, rewards: Rewards | None, dataset: Any) -> PythonInputs:
    """Returns what ``train`` writes for ``rewards`` and ``dataset``; ``None`` leaves the recipe's own. Raises ``UserError`` for what cannot be used."""
    if rewards is None and dataset is None:
        return PythonInputs({}, lambda folder: recipe)
    if isinstance(recipe, PretrainRecipe):
        what = "rewards" if rewards is not None else "dataset"
        raise UserError(f"train(..., {what}=...) is for reinforcement learning, and algorithm.name is '{recipe.algorithm.name}'; leave {what} out")
    files: dict[str, bytes] = {}
    functions = None if rewards is None else _functions(rewards, files)
    task = recipe.task if dataset is None else _task(recipe.task, dataset, files)

    def recipe_in(folder: Path) -> AnyRecipe:
        given = recipe.rewards
        if functions is not None:
            placed = tuple(replace(f, function=str(folder / f.function)) if f.function.partition(":")[0] in files else f for f in functions)
            accuracy = given.accuracy if given.accuracy in [f.label for f in placed] else ""
            given = replace(given, functions=placed, accuracy=accuracy)
            given.check()
        path, eval_path = (str(folder / name) if name in files else name for name in (task.path, task.eval_path))
        return replace(recipe, rewards=given, task=replace(task, path=path, eval_path=eval_path))

    return PythonInputs(files, recipe_in)


def with_dataset_task(sections: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the ``sections`` of a recipe whose prompts ``train`` is given as ``dataset``, with a section ``task`` that needs no path."""
    task = sections.get("task", {})
    return {**sections, "task": {"name": "dataset", "path": "train.jsonl", **task}} if isinstance(task, Mapping) else sections


@contextlib.contextmanager
def written_for_checks(inputs: PythonInputs) -> Iterator[AnyRecipe]:
    """Yields the recipe with its files, where it has some, in a temporary folder: before a run's folder is made, what it will read is checked."""
    with temporary_folder() if inputs.files else contextlib.nullcontext(Path()) as folder:
        yield inputs.write(folder)


def _functions(rewards: Rewards, files: dict[str, bytes]) -> list[RewardFunctionConfig]:
    each = rewards if isinstance(rewards, Sequence) and not isinstance(rewards, str) else [rewards]
    functions: list[RewardFunctionConfig] = []
    for number, reward in enumerate(each):
        function, weight = reward if isinstance(reward, tuple) and len(reward) == 2 else (reward, 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise UserError(f"rewards[{number}] is a pair whose second is {weight!r}; it must be the weight, a number")
        config = _function(function, number, float(weight), files, [known.label for known in functions])
        config.check()
        functions.append(config)
    if not functions:
        raise UserError("rewards is an empty list; name a function, or leave rewards out")
    return functions


def _function(function: Any, number: int, weight: float, files: dict[str, bytes], known: Sequence[str]) -> RewardFunctionConfig:
    if isinstance(function, RewardFunctionConfig):
        return function
    if isinstance(function, Mapping):
        return build(RewardFunctionConfig, function, f"rewards[{number}]")
    if isinstance(function, str):
        return RewardFunctionConfig(function, weight=weight)
    if any(base.__module__.startswith(("torch.nn", "transformers.")) for base in type(function).__mro__):
        raise UserError(
            f"rewards[{number}] is a model ({type(function).__name__}); serve it behind HTTP and give its address, for example 'http://127.0.0.1:5000/get_reward'"
        )
    if isinstance(function, type) or not callable(function):
        raise UserError(f"rewards[{number}] is {_described(function)}; it must be a function, 'module:function', an address, or a pair with a weight")
    name = _free_name(_name_of(function, number), known)
    place = _place_of(function)
    if place is None:
        files[f"{name}.pkl"] = _pickled(function, number)
        place = f"{name}.pkl:{name}"
    return RewardFunctionConfig(place, name=name, weight=weight)


def _name_of(function: Any, number: int) -> str:
    inner = function.func if isinstance(function, partial) else function
    name = getattr(inner, "__name__", type(inner).__name__)
    return name if name.isidentifier() else f"reward_{number}"


def _free_name(name: str, known: Sequence[str]) -> str:
    free, number = name, 1
    while free in known:
        number += 1
        free = f"{name}_{number}"
    return free


def _place_of(function: Any) -> str | None:
    """Returns where another process finds ``function``: ``file.py:name`` of a file of its own, ``module:name`` of a module in a package. ``None`` if it has
    to be written by value: of a notebook or of the program itself, a lambda, a closure, or a callable object."""
    module_name, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or not module_name or module_name == "__main__" or not name.isidentifier():
        return None
    try:
        module = importlib.import_module(module_name)
    except Exception:  # A module that is not found again, or raises.
        return None
    if getattr(module, name, None) is not function:
        return None
    file = getattr(module, "__file__", None)
    return f"{Path(file).resolve()}:{name}" if file and not module.__package__ and file.endswith(".py") else f"{module_name}:{name}"


def _pickled(function: Any, number: int) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        raise UserError(
            f"rewards[{number}] is {_described(function)}, which is written to the run by cloudpickle, and it is not installed; pip install "
            "'tandem-rl[notebook]', or put the function in a file and import it"
        ) from None
    try:
        content: bytes = cloudpickle.dumps(function)
    except Exception as error:  # Of whatever the function refers to.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"rewards[{number}] is {_described(function)}, which cannot be written to the run: {reason}; put it in a file and import it") from None
    return content


def _task(task: TaskConfig, dataset: Any, files: dict[str, bytes]) -> TaskConfig:
    kept = {name: getattr(task, name) for name in ("held_out_share", "prompt_template", "chat", "system_prompt", "prompt_key", "answer_key")}
    given = TaskConfig("dataset", **kept) if task.name == "dataset" else TaskConfig("dataset", **{**kept, "prompt_key": "auto", "answer_key": "auto"})
    if isinstance(dataset, str | Path):
        return replace(given, path=str(dataset), subset=task.subset, split=task.split, revision=task.revision)
    if isinstance(dataset, Mapping):
        if "train" not in dataset:
            raise UserError(f"dataset is a mapping with {', '.join(map(repr, dataset)) or 'no keys'}; it needs 'train', and may have {' or '.join(HELD_OUT)}")
        held_out = next((name for name in HELD_OUT if name in dataset), None)
        files["train.jsonl"] = _lines(dataset["train"])
        if held_out is None:
            return replace(given, path="train.jsonl")
        files["held_out.jsonl"] = _lines(dataset[held_out])
        return replace(given, path="train.jsonl", eval_path="held_out.jsonl", held_out_share=None)
    files["train.jsonl"] = _lines(dataset)
    return replace(given, path="train.jsonl")


def _lines(dataset: Any) -> bytes:
    """Returns the rows of ``dataset`` as JSON lines: of ``datasets.Dataset``, ``pandas`` and ``polars`` data frames, Arrow tables and sequences of
    mappings. Raises ``UserError``."""
    if hasattr(dataset, "take") and hasattr(dataset, "_ex_iterable"):
        raise UserError("dataset is an IterableDataset, which has no length; give the rows that you want, for example list(dataset.take(10000))")
    for name, options in (("to_pylist", {}), ("to_dicts", {}), ("to_list", {}), ("to_dict", {"orient": "records"})):
        if not isinstance(dataset, list | tuple) and hasattr(dataset, name):
            with contextlib.suppress(TypeError):
                dataset = getattr(dataset, name)(**options)
                break
    if not isinstance(dataset, Sequence) or isinstance(dataset, str | bytes):
        raise UserError(
            f"dataset is {_described(dataset)}; it must be a datasets.Dataset, a list of dicts, a pandas DataFrame, a path or a name on the Hub"
        )
    if not dataset:
        raise UserError("dataset is empty; it needs at least one row")
    lines = []
    for number, row in enumerate(dataset):
        if not isinstance(row, Mapping):
            raise UserError(f"dataset[{number}] is {_described(row)}; a row is a dict, for example {{'prompt': ..., 'answer': ...}}")
        try:
            lines.append(json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n")
        except (TypeError, ValueError) as error:
            raise UserError(f"dataset[{number}] cannot be written as JSON: {error}; leave that column out") from None
    return "".join(lines).encode("utf-8", "surrogatepass")


def _plain(value: Any) -> Any:
    """Returns a JSON value: numbers and arrays of numpy as Python's, moments as text, NaN as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, Path):
        return str(value)
    for name in ("item", "tolist"):
        if hasattr(value, name):
            with contextlib.suppress(ValueError):
                return _plain(getattr(value, name)())
    raise TypeError(f"a value is {_described(value)}")


def _described(value: Any) -> str:
    kind = type(value)
    name = getattr(value, "__name__", "") if callable(value) else ""
    named = f" '{name}'" if name else ""
    return f"a {kind.__name__}{named}" if kind.__module__ == "builtins" else f"a {kind.__module__.partition('.')[0]}.{kind.__name__}{named}"
