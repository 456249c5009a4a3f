"""Combinations of a recipe's sections that would train on something else than they say."""

from pathlib import Path
from typing import Any

import pytest

from tandem.config.load import build
from tandem.config.recipe import Recipe, load_config
from tandem.types import UserError


def recipe(rollout: dict[str, Any], algorithm: dict[str, Any]) -> Recipe:
    return build(Recipe, {"model": {"path": "m"}, "task": {"name": "sort"}, "rollout": rollout, "algorithm": algorithm})


@pytest.mark.parametrize("filtered", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_a_filter_at_another_temperature_needs_old_logprobs_of_the_trainer(filtered: dict[str, Any]) -> None:
    capped = {"tis_cap": 2.0}
    with pytest.raises(UserError, match=r"temperature 0.7 and .* set algorithm.old_logprobs to recompute") as caught:
        recipe({"temperature": 0.7, **filtered}, capped)
    assert "\n" not in str(caught.value)
    recipe({"temperature": 0.7, **filtered}, {**capped, "old_logprobs": "recompute"})
    recipe(filtered, capped)
    recipe({"temperature": 0.7}, {})
    with pytest.raises(UserError, match="tis_cap"):
        recipe(filtered, {"old_logprobs": "recompute"})


@pytest.mark.parametrize("name", ["sfft", ["sft"], 3])
def test_an_unknown_algorithm_is_named_before_the_sections_of_another_kind_of_recipe(name: Any) -> None:
    with pytest.raises(UserError) as caught:
        load_config(Path(__file__).parents[2] / "recipes" / "sft.yaml", [f"--algorithm.name={name}"])
    assert str(caught.value) == f"'algorithm.name' is {name!r}; it must be one of grpo, ppo, dpo, pretrain, sft"
