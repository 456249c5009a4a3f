"""The change that a run that does not fit is refused with: it is enough, and none without a part of it is."""

import pytest

from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import AnyRecipe, load_config
from tandem.jobs.checks.check_data import data_run_needs
from tandem.jobs.checks.smallest_change import smallest_change
from tandem.jobs.pod_plan import plan_of
from tandem.layout.shapes import ModelShapes
from tandem.types import RunError

SHAPES = ModelShapes("llama", 32000, 1024, 20, 16, 8, 64, 2816, 4096, tie_word_embeddings=False)
MIB = 1 << 20
PRETRAIN = ("data.sequence_length=512", "data.global_batch_size=64", "trainer.micro_batch_tokens=8192")


def pretraining(*overrides: str) -> PretrainRecipe:
    recipe = load_config("pretrain", ["--" + each for each in (*PRETRAIN, *overrides)])
    assert isinstance(recipe, PretrainRecipe)
    return recipe


def needed(recipe: AnyRecipe) -> int:
    assert isinstance(recipe, PretrainRecipe)
    return data_run_needs(recipe, SHAPES, "cpu").host


def parts(change: str) -> list[str]:
    """Returns the overrides that a change in words asks for."""
    pieces = []
    for part in change.removeprefix("set ").split(" to "):
        pieces.append(part)
    overrides, keys = [], pieces[0]
    for rest in pieces[1:]:
        value, _, following = rest.partition(" and ")
        overrides += [f"{key}={value}" for key in keys.replace(" and ", ", ").split(", ")]
        keys = following
    return overrides


@pytest.mark.parametrize("ranks", ((), ("parallel.data=2",), ("parallel.pipeline=2",)), ids=("one", "data", "pipeline"))
@pytest.mark.parametrize("share", (0.95, 0.8, 0.6, 0.4, 0.2))
def test_the_change_is_enough_and_no_part_of_it_alone_is(ranks: tuple[str, ...], share: float) -> None:
    recipe = pretraining(*ranks)
    limit = share * needed(recipe)
    change = smallest_change(recipe, lambda changed: needed(changed) <= limit)
    assert change.startswith("set ") and len(change.splitlines()) == 1
    overrides = parts(change)
    assert needed(pretraining(*ranks, *overrides)) <= limit < needed(recipe), change
    paged = [each for each in overrides if each.startswith("trainer.offload")]
    for override in set(overrides) - set(paged):
        fewer = [each for each in overrides if each != override]
        assert needed(pretraining(*ranks, *fewer)) > limit, (change, override)


def test_zero_comes_before_what_costs_time_and_a_smaller_batch_last() -> None:
    recipe = pretraining("parallel.data=2")
    limit = needed(recipe) - 100 * MIB
    assert smallest_change(recipe, lambda changed: needed(changed) <= limit) == "set parallel.zero to 1"
    assert smallest_change(recipe, lambda changed: needed(changed) <= 1) == ""


def test_a_pod_that_does_not_fit_is_refused_with_a_change_of_its_recipe() -> None:
    recipe = load_config("sort", ["--machine.memory_gib=2.5", "--residents.plan=keep", "--trainer.micro_batch_tokens=65536"])
    shapes = ModelShapes("llama", 100, 512, 12, 8, 4, 64, 1536, 128, tie_word_embeddings=False)
    with pytest.raises(RunError) as refused:
        plan_of(recipe, shapes, 64)  # type: ignore[arg-type]
    (line,) = str(refused.value).splitlines()
    change = line.partition(", or set ")[2]
    assert change, line
    overrides = [f"--{each}" for each in parts(change)]
    plan_of(load_config("sort", ["--machine.memory_gib=2.5", "--residents.plan=keep", "--trainer.micro_batch_tokens=65536", *overrides]), shapes, 64)  # type: ignore[arg-type]
