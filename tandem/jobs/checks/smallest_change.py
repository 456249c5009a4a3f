"""The smallest change with which a recipe fits on a machine that is too small for it. Imports no torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import AnyRecipe, Recipe
from tandem.types.errors import UserError

Change = Mapping[str, Any]
"""New values by the recipe's keys."""


def smallest_change(recipe: AnyRecipe, fits: Callable[[AnyRecipe], bool]) -> str:
    """Returns what to set so that ``recipe`` ``fits``: of the changes that save memory, from the one that costs least time on, as many as are needed and none
    without which it fits too. Empty if none of them is enough."""
    chosen: list[Change] = []
    for change in changes(recipe):
        if is_enough(recipe, [change], fits):
            return describe([change])
        if valid(recipe, [*chosen, change]) is not None:
            # A later value of the same key takes the place of an earlier one.
            chosen = [*(each for each in chosen if each.keys() != change.keys()), change]
        if is_enough(recipe, chosen, fits):
            break
    else:
        return ""
    for change in tuple(chosen):
        without = [each for each in chosen if each is not change]
        if is_enough(recipe, without, fits):
            chosen = without
    return describe(chosen)


def changes(recipe: AnyRecipe) -> Iterator[Change]:
    """Yields single changes in the order of the time that they cost."""
    trainer = recipe.trainer
    if isinstance(recipe, Recipe) and recipe.residents.plan != "auto":
        yield {"residents.plan": "auto"}
    if recipe.parallel.data > 1:
        yield from ({"parallel.zero": stage} for stage in range(recipe.parallel.zero + 1, 4))
    if isinstance(recipe, PretrainRecipe):
        yield from ({"data.read_ahead": ahead} for ahead in _halves(recipe.data.read_ahead, 1))
    yield from ({"trainer.micro_batch_tokens": tokens} for tokens in _halves(trainer.micro_batch_tokens, _longest(recipe)))
    if isinstance(recipe, Recipe):
        yield from ({"rollout.engine.max_num_seqs": count} for count in _halves(recipe.rollout.engine.max_num_seqs, 1))
        yield from ({"rollout.workers": count} for count in _halves(recipe.rollout.workers, 1))
    yield from ({"trainer.recompute": kind} for kind in ("selective", "full"))
    yield {"trainer.optimizer": "adamw8bit"}
    paged = {"trainer.offload": "nvme"}
    yield paged
    yield {**paged, "trainer.offload_parameters": "nvme"}
    yield {**paged, "trainer.offload_parameters": "nvme", "trainer.offload_activations": "nvme"}
    if recipe.checkpoint.memory_every_steps:
        yield {"checkpoint.memory_every_steps": 0}
    # A smaller batch trains another way; it is what is left.
    if isinstance(recipe, PretrainRecipe):
        yield from ({"data.global_batch_size": size} for size in _halves(recipe.data.global_batch_size, recipe.parallel.data))
    else:
        yield from ({"rollout.prompts_per_step": count} for count in _halves(recipe.rollout.prompts_per_step, 1))


def is_enough(recipe: AnyRecipe, chosen: Sequence[Change], fits: Callable[[AnyRecipe], bool]) -> bool:
    changed = valid(recipe, chosen)
    try:
        return changed is not None and changed != recipe and fits(changed)
    except UserError:
        return False


def valid(recipe: AnyRecipe, chosen: Sequence[Change]) -> AnyRecipe | None:
    """Returns ``recipe`` with the changes, ``None`` where they do not go together."""
    changed: Any = recipe
    for change in chosen:
        for key, value in change.items():
            changed = _with(changed, key.split("."), value)
    try:
        changed.check()
    except UserError:
        return None
    return changed  # type: ignore[no-any-return]


def describe(chosen: Sequence[Change]) -> str:
    """Returns the changes in words, such as ``set trainer.recompute to full``."""
    values = {key: value for change in chosen for key, value in change.items()}
    by_value: dict[Any, list[str]] = {}
    for key, value in values.items():
        by_value.setdefault(value, []).append(key)
    return "set " + " and ".join(f"{_listed(keys)} to {value}" for value, keys in by_value.items())


def _listed(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"


def _halves(value: int, least: int) -> Iterator[int]:
    """Yields half of ``value``, a quarter of it and so on, not below ``least``."""
    while value // 2 >= max(least, 1):
        value //= 2
        yield value


def _longest(recipe: AnyRecipe) -> int:
    """Returns the tokens below which a smaller micro-batch changes nothing, because sequences are not split."""
    return recipe.sequences_each * recipe.data.sequence_length if isinstance(recipe, PretrainRecipe) else recipe.rollout.max_tokens


def _with(section: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    return replace(section, **{name: _with(getattr(section, name), rest, value) if rest else value})
