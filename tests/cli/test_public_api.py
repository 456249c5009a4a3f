"""What ``import tandem`` offers, and that the documents name every setting there is."""

import dataclasses
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from helpers_cli import ROOT

import tandem
from tandem.config.recipe import Recipe
from tandem.types import UserError


def test_the_public_names_are_those_of_their_modules() -> None:
    from tandem.config.recipe import load_config
    from tandem.engine.llm import LLM
    from tandem.engine.sampling_params import SamplingParams
    from tandem.jobs.start import train

    assert (tandem.LLM, tandem.SamplingParams, tandem.load_config, tandem.train) == (LLM, SamplingParams, load_config, train)
    assert set(tandem.__all__) == {"LLM", "SamplingParams", "__version__", "load_config", "train"}


def test_importing_tandem_and_reading_a_recipe_loads_no_torch() -> None:
    code = "import sys, tandem; tandem.load_config('recipes/sort.yaml'); tandem.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        tandem.LLMs  # noqa: B018


def test_a_recipe_trains_from_python_and_the_model_answers(recipe: Path) -> None:
    code = (
        "import sys; from tandem import LLM, SamplingParams, load_config, train\n"
        "result = train(load_config(sys.argv[1], ['run.name=mine']), inline=True)\n"
        "assert result.steps == 1 and result.model.is_dir() and result.report.is_file()\n"
        "print(LLM(result.model).generate(['21='], SamplingParams(max_tokens=3, temperature=0))[0].outputs[0].token_ids)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(recipe)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.match(r"[\[(]\d+", done.stdout)


def test_mistakes_from_python_are_user_errors(recipe: Path) -> None:
    with pytest.raises(UserError, match=r"run\.seed"):
        tandem.load_config(recipe, ["run.sed=1"])
    with pytest.raises(UserError, match="GiB"):
        tandem.train(tandem.load_config(recipe, ["machine.memory_gib=0.001"]))


def keys(section: type, where: str = "") -> dict[str, set[str]]:
    """Every key of ``section`` and of the sections below it, by dotted section."""
    found: dict[str, set[str]] = {where: set()}
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        if not field.init:
            continue
        found[where].add(field.name)
        nested = [hint for hint in (hints[field.name], *typing.get_args(hints[field.name])) if dataclasses.is_dataclass(hint)]
        for hint in nested:
            found |= keys(hint, f"{where}.{field.name}".lstrip("."))
    return found


def documented() -> dict[str, set[str]]:
    """The keys in the first column of the tables of docs/recipes.md, by the section that their headline names."""
    found: dict[str, set[str]] = {}
    section = None
    for line in (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            headline = re.match(r"#+ `([\w.]+)`", line)
            section = headline[1] if headline else None
        elif section is not None and line.startswith("| `"):
            found.setdefault(section, set()).update(re.findall(r"`(\w+)`", line.split("|")[1]))
    return found


def test_docs_recipes_names_every_key_of_every_section_and_no_other() -> None:
    expected = keys(Recipe)
    del expected[""]
    assert documented() == expected


def test_docs_recipes_gives_every_default_as_it_is() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    section = None
    checked = 0
    defaults = {name: {f.name: f for f in dataclasses.fields(cls)} for name, cls in sections(Recipe).items()}
    for line in text.splitlines():
        if line.startswith("#"):
            headline = re.match(r"#+ `([\w.]+)`", line)
            section = headline[1] if headline else None
        elif section is not None and line.startswith("| `"):
            key, shown = (cell.strip() for cell in line.split("|")[1:3])
            default = defaults[section][key.strip("`")].default
            if isinstance(default, bool | int | float | str):
                want = str(default).lower() if isinstance(default, bool) else (f"{default:g}" if isinstance(default, float) else str(default))
                assert shown.strip("`") == (want or "empty"), (section, key)
                checked += 1
    assert checked > 60


def sections(section: type, where: str = "") -> dict[str, type]:
    """Every dataclass of the recipe by its dotted section."""
    found = {where: section} if where else {}
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        for hint in (hints[field.name], *typing.get_args(hints[field.name])):
            if dataclasses.is_dataclass(hint):
                found |= sections(hint, f"{where}.{field.name}".lstrip("."))  # type: ignore[arg-type]
    return found
