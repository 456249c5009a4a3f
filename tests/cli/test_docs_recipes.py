"""``docs/recipes.md`` has the tables of the configuration classes."""

import dataclasses

from helpers_cli import ROOT

from tandem.config.describe import field_descriptions
from tandem.config.document import document, gateway_document, sections
from tandem.config.engine import EngineArgs
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import Recipe

TEXT = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


def rows(text: str, section: str) -> dict[str, str]:
    """Returns key and default of each row of the table below the heading of ``section``."""
    _, _, after = text.partition(f"# `{section}`\n")
    table = after.split("\n#")[0].splitlines()
    cells = [line.split("|")[1:3] for line in table if line.startswith("| `")]
    return {key.strip(" `"): default.strip(" `") for key, default in cells}


def test_the_committed_tables_are_those_of_the_classes() -> None:
    assert document(TEXT) == TEXT, "run: python -m tandem.config.document docs/recipes.md"
    gateway = (ROOT / "docs" / "gateway.md").read_text(encoding="utf-8")
    assert gateway_document(gateway) == gateway, "run: python -m tandem.config.document docs/gateway.md"
    assert document(TEXT.replace("| `group_size` | `8` |", "| `group_size` | `9` |")) == TEXT


def test_every_key_that_a_recipe_takes_has_a_row_with_its_default() -> None:
    for recipe in (Recipe, PretrainRecipe):
        for section in sections(recipe):
            found = rows(TEXT, section.name) if section.name not in ("algorithm", "checkpoint", "evaluation") or recipe is Recipe else None
            for field in dataclasses.fields(section.kind):
                if found is not None and field.name not in section.refused:
                    assert field.name in found, (section.name, field.name)
                    if isinstance(field.default, str | int) and not isinstance(field.default, bool) and field.default != "":
                        # A text of several lines has each of them in backticks.
                        assert found[field.name].split("` `") == [line for line in str(field.default).splitlines() if line]
    assert rows(TEXT, "rollout.engine")["max_num_seqs"] == "256" and "model" not in rows(TEXT, "rollout.engine")
    assert rows(TEXT, "trainer")["learning_rate"] == "1e-06" and rows(TEXT, "trainer")["schedule"] == "constant"
    assert rows(TEXT, "model.create")["tie_word_embeddings"] == "true" and rows(TEXT, "task")["name"] == "required"


def test_a_field_without_a_description_cannot_be_documented() -> None:
    @dataclasses.dataclass(frozen=True)
    class Bare:
        key: int = 0

    assert field_descriptions(EngineArgs).keys() == {field.name for field in dataclasses.fields(EngineArgs)}
    assert field_descriptions(Bare) == {}
