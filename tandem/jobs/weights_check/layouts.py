"""Two layouts to check weights between: the trainer's and the rollout's, as a person writes them, and the recipe of a pod that has them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from tandem.backends.environment import python_of
from tandem.config.engine import EngineArgs
from tandem.config.load import apply_overrides, build
from tandem.config.parallel import ParallelConfig
from tandem.config.recipe import Recipe
from tandem.config.trainer import TrainerConfig
from tandem.types import UserError

SleepLevel = Literal[0, 1, 2]
GROUP_SIZE = 4
_BETWEEN = re.compile(r",(?![^\[{]*[\]}])")
_IN_PARALLEL, _IN_TRAINER, _IN_ENGINE = ({field.name for field in fields(section)} for section in (ParallelConfig, TrainerConfig, EngineArgs))


@dataclass(frozen=True, slots=True)
class LayoutPair:
    """``trainer`` and ``rollout``: settings ``KEY=VALUE,KEY=VALUE``, empty for one process each. ``sleep``: the level at which the engine sleeps
    between the two updates (0: it stays awake)."""

    trainer: str = ""
    rollout: str = ""
    sleep: SleepLevel = 0

    @property
    def title(self) -> str:
        sleeps = f", sleep level {self.sleep}" if self.sleep else ""
        return f"{self.trainer or 'one rank'} -> {self.rollout or 'one rank'}{sleeps}"


def recipe_of_pair(pair: LayoutPair, model: Path, seed: int, threads: int = 0) -> Recipe:
    """Returns the recipe of a pod with the layouts of ``pair`` for the ``model`` in a folder. Raises ``UserError`` for a setting that is unknown, or that a
    recipe refuses."""
    data: dict[str, Any] = {
        "model": {"path": str(model)},
        "task": {"name": "sort"},
        "rollout": {"prompts_per_step": GROUP_SIZE, "max_tokens": 2, "weights": "copied", "engine": {"max_num_seqs": GROUP_SIZE}},
        # An engine that quantizes draws from another distribution than the trainer's, which a recipe has to correct.
        "algorithm": {"group_size": GROUP_SIZE, "kl_coef": 0.0, "old_logprobs": "recompute", "tis_cap": 2.0},
        # Far more than anybody trains with, so that a step changes codes of 4 bits too.
        "trainer": {"learning_rate": 0.05, "warmup_steps": 0},
        "checkpoint": {"asynchronous": False},
        "residents": {"plan": "keep"},
        "run": {"seed": seed, "max_steps": 2},
        "machine": {"threads": threads},
    }
    overrides = [*_trainer_keys(pair.trainer), *_rollout_keys(pair.rollout)]
    _check_same_dtype(overrides)
    recipe = build(Recipe, apply_overrides(data, overrides))
    if pair.sleep and recipe.rollout.engine.tensor_parallel_size > 1:
        raise UserError(f"--sleep is {pair.sleep} and tensor_parallel_size {recipe.rollout.engine.tensor_parallel_size}: a tensor-parallel engine cannot sleep")
    if recipe.rollout.weights != "copied" and recipe.rollout.engine.tensor_parallel_size > 1:
        raise UserError(
            f"--rollout has weights={recipe.rollout.weights} and tensor_parallel_size {recipe.rollout.engine.tensor_parallel_size}: such ranks stack other "
            "matrices than those that copy, so their digests cannot be compared; leave weights out"
        )
    if pair.sleep and recipe.rollout.backend != "tandem":
        raise UserError(f"--sleep is {pair.sleep} and backend '{recipe.rollout.backend}', which frees nothing when it sleeps on a CPU; leave --sleep out")
    for backend in (recipe.trainer.backend, recipe.rollout.backend):
        if backend != "tandem":
            python_of(backend)
    return recipe


def _trainer_keys(text: str) -> Iterator[str]:
    for key, value in _settings(text, "--trainer"):
        first = key.partition(".")[0]
        if first not in _IN_PARALLEL | _IN_TRAINER:
            raise UserError(f"--trainer has the unknown key '{key}'; it takes those of a recipe's sections parallel and trainer, such as tensor=2 or zero=1")
        yield f"{'parallel' if first in _IN_PARALLEL else 'trainer'}.{key}={value}"


def _rollout_keys(text: str) -> Iterator[str]:
    for key, value in _settings(text, "--rollout"):
        if key == "dtype":
            # The engine of a pod has the trainer's dtype.
            yield f"trainer.dtype={value}"
        elif key in ("workers", "backend", "weights"):
            yield f"rollout.{key}={value}"
        elif key.partition(".")[0] in _IN_ENGINE:
            yield f"rollout.engine.{key}={value}"
        else:
            known = "workers, backend, weights and the keys of rollout.engine, such as tensor_parallel_size=2"
            raise UserError(f"--rollout has the unknown key '{key}'; it takes {known}")


def _settings(text: str, option: str) -> Iterator[tuple[str, str]]:
    seen = set[str]()
    for setting in filter(None, _BETWEEN.split(text)):
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not (key and equals and value):
            raise UserError(f"{option} has '{setting}'; write KEY=VALUE,KEY=VALUE, for example tensor=2")
        if key in seen:
            raise UserError(f"{option} has '{key}' twice; give it once")
        seen.add(key)
        yield key, value


def _check_same_dtype(overrides: list[str]) -> None:
    given = [text.partition("=")[2] for text in overrides if text.startswith("trainer.dtype=")]
    if len(set(given)) > 1:
        raise UserError(f"dtype is {given[0]} in --trainer and {given[1]} in --rollout; a pod's engine has the trainer's dtype: give one, or use quantization")
