"""``docs/recipes.md`` has the tables of the configuration classes, and the commands of the documents are valid."""

import dataclasses
import re
import shlex

import pytest
import yaml
from helpers_cli import ROOT

import tandem
from tandem.cli.main import parser
from tandem.config.describe import field_descriptions
from tandem.config.document import document, sections
from tandem.config.engine import EngineArgs
from tandem.config.load import build, read_yaml
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import Recipe
from tandem.config.rewards import RewardsConfig

TEXT = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
PRETRAINING = (ROOT / "docs" / "pretraining.md").read_text(encoding="utf-8")


def rows(text: str, section: str) -> dict[str, str]:
    """Returns key and default of each row of the table below the heading of ``section``."""
    _, _, after = text.partition(f"# `{section}`\n")
    table = after.split("\n#")[0].splitlines()
    cells = [line.split("|")[1:3] for line in table if line.startswith("| `")]
    return {key.strip(" `"): default.strip(" `") for key, default in cells}


def test_the_committed_tables_are_those_of_the_classes() -> None:
    assert document(TEXT) == TEXT, "run: python -m tandem.config.document docs/recipes.md"
    assert document(TEXT.replace("| `group_size` | `8` |", "| `group_size` | `9` |")) == TEXT


def test_every_key_that_a_recipe_takes_has_a_row_with_its_default() -> None:
    for recipe in (Recipe, PretrainRecipe):
        for section in sections(recipe):
            found = rows(TEXT, section.name) if section.name not in ("algorithm", "checkpoint", "evaluation") or recipe is Recipe else None
            for field in dataclasses.fields(section.kind):
                if found is not None and field.name not in section.refused:
                    assert field.name in found, (section.name, field.name)
                    if isinstance(field.default, str | int) and not isinstance(field.default, bool) and field.default != "":
                        assert found[field.name] == str(field.default)
    assert rows(TEXT, "rollout.engine")["max_num_seqs"] == "256" and "model" not in rows(TEXT, "rollout.engine")
    assert rows(TEXT, "trainer")["learning_rate"] == "1e-06" and rows(TEXT, "trainer")["schedule"] == "constant"
    assert rows(TEXT, "model.create")["tie_word_embeddings"] == "true" and rows(TEXT, "task")["name"] == "required"


def test_a_field_without_a_description_cannot_be_documented() -> None:
    @dataclasses.dataclass(frozen=True)
    class Bare:
        key: int = 0

    assert field_descriptions(EngineArgs).keys() == {field.name for field in dataclasses.fields(EngineArgs)}
    assert field_descriptions(Bare) == {}


def test_commands_of_pretraining_are_in_order() -> None:
    lines = [line for block in re.findall(r"```sh\n(.*?)```", PRETRAINING, re.S) for line in block.splitlines()]
    commands = []
    for line in lines:
        program, *words = shlex.split(line, comments=True)
        assert program == "tandem"
        commands.append(parser().parse_args(words).command)
    assert commands == ["tokenize", "tokenize", "train", "resume", "tokenize", "train"]


@pytest.mark.parametrize("name", ["README.md", "docs/inference.md", "docs/quantization.md", "docs/recipes.md", "docs/training.md"])
def test_yaml_in_a_document_is_part_of_a_recipe(name: str) -> None:
    for block in re.findall(r"```yaml\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.S):
        recipe = read_yaml(ROOT / "recipes" / "sort.yaml")
        for section, keys in yaml.safe_load(block).items():
            recipe[section] = {**recipe.get(section, {}), **keys}
        build(Recipe, recipe)


def test_its_commands_and_its_yaml_are_in_order() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.S)
    assert build(RewardsConfig, yaml.safe_load(block)["rewards"]).accuracy_function == "exact_symbol"
    commands = [line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S) for line in block.splitlines()]
    for line in commands:
        program, *words = shlex.split(line, comments=True)
        options, overrides = parser().parse_known_args(words)
        assert program == "tandem" and options.command == "train"
        tandem.load_config(ROOT / options.recipe, overrides)
    assert len(commands) >= 5
