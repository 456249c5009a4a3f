"""Paths in a run's ``config.yaml`` to files in the run's own folder, which may be moved: ``run://inputs/train.jsonl``."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PREFIX = "run://"

Rewrite = Callable[[str], str]


def with_run_paths(data: Mapping[str, Any], directory: Path, inside: Path) -> dict[str, Any]:
    """Returns the recipe ``data`` as it is written to ``directory``: paths of files below ``inside``, which is ``directory`` or the folder that it is in,
    relative to ``directory``."""
    below = f"{inside.resolve()}{os.sep}"
    return _rewritten(data, lambda path: f"{PREFIX}{os.path.relpath(path, directory.resolve())}" if path.startswith(below) else path)


def without_run_paths(data: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the recipe ``data``, which was read from a file in ``directory``, with paths that exist."""
    return _rewritten(data, lambda path: os.path.normpath(directory.resolve() / path.removeprefix(PREFIX)) if path.startswith(PREFIX) else path)


def _rewritten(data: Mapping[str, Any], rewrite: Rewrite) -> dict[str, Any]:
    changed = dict(data)
    task, rewards = data.get("task"), data.get("rewards")
    if isinstance(task, Mapping):
        changed["task"] = {key: rewrite(value) if key in ("path", "eval_path") and isinstance(value, str) else value for key, value in task.items()}
    if isinstance(rewards, Mapping) and isinstance(rewards.get("functions"), list):
        changed["rewards"] = {**rewards, "functions": [_function(function, rewrite) for function in rewards["functions"]]}
    return changed


def _function(function: Any, rewrite: Rewrite) -> Any:
    if isinstance(function, Mapping) and isinstance(function.get("function"), str):
        return {**function, "function": rewrite(function["function"])}
    return function
