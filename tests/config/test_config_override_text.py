"""A value of the command line that is a mapping or a list in YAML is a text where the key is one."""

from pathlib import Path
from typing import Any

import pytest

from tandem.config.recipe import Recipe, load_config
from tandem.types import UserError

RECIPE = "model: {path: m}\ntask: {name: sort}\n"


def loaded(folder: Path, *overrides: str) -> Any:
    (folder / "recipe.yaml").write_text(RECIPE)
    recipe = load_config(folder / "recipe.yaml", overrides)
    assert isinstance(recipe, Recipe)
    return recipe


@pytest.mark.parametrize("template", ["{prompt}", "{prompt}=", "Q: {prompt}", "[INST] {prompt} [/INST]", "[{prompt}]", "{a: 1} {prompt}", '"Q:\\n{prompt}"'])
def test_a_prompt_template_on_the_command_line_is_the_text_that_was_typed(tmp_path: Path, template: str) -> None:
    expected = template if not template.startswith('"') else "Q:\n{prompt}"
    assert loaded(tmp_path, f"--task.prompt_template={template}").task.prompt_template == expected


def test_a_mapping_or_list_is_still_one_where_the_key_is(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, "--rollout.stop=[a, b]", "--task={name: reasoning_gym:chain_sum, settings: {max_terms: 2}}")
    assert list(recipe.rollout.stop) == ["a", "b"] and recipe.task.settings == {"max_terms": 2}
    with pytest.raises(UserError, match=r"'run.max_steps' is a mapping"):
        loaded(tmp_path, "--run.max_steps={a}")
