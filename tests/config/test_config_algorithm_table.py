"""Every row of the table of algorithms in docs/rl.md is a recipe that loads, with the settings that the row names."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.config.recipe import IN_A_POD, Recipe, recipe_of

TEXT = (Path(__file__).parents[2] / "docs" / "rl.md").read_text()
BASE: dict[str, Any] = {"model": {"path": "m"}, "task": {"name": "sort"}}


def rows() -> dict[str, str]:
    """Returns the second column of the table by its first."""
    _, _, table = TEXT.partition("| algorithm | keys of section `algorithm` |")
    lines = table.partition("\n\n")[0].splitlines()[2:]
    return {name.strip(): keys for name, keys in (line.split("|")[1:3] for line in lines)}


def settings(keys: str) -> dict[str, Any]:
    """Returns the sections that `key: value` and a section named in the cell ``keys`` make."""
    sections: dict[str, Any] = {section: {} for section in re.findall(r"section `(\w+)`", keys)}
    for item in re.findall(r"`([\w.]+: [^`]+)`", keys):
        [(key, value)] = yaml.safe_load(item).items()
        section, _, name = key.rpartition(".")
        sections.setdefault(section or "algorithm", {})[name] = value
    return sections


def recipe(keys: str) -> Recipe:
    made = recipe_of({**BASE, **settings(keys)})
    assert isinstance(made, Recipe)
    return made


@pytest.mark.parametrize("name", rows())
def test_a_row_of_the_table_of_algorithms_loads_with_its_settings(name: str) -> None:
    keys = rows()[name]
    made, given = recipe(keys), settings(keys)
    assert given, "the row names no setting"
    for section, values in given.items():
        for key, value in values.items():
            read = getattr(getattr(made, section), key)
            # YAML reads 3e-4 as text, a recipe as a number.
            assert read == (float(value) if isinstance(read, float) else value), (section, key)


def test_no_two_rows_are_the_same_and_every_algorithm_of_a_pod_has_one() -> None:
    made = [recipe(keys).algorithm for keys in rows().values()]
    assert len(set(made)) == len(made) > 10
    assert {algorithm.name for algorithm in made} == set(IN_A_POD)
