"""docs/recipes.md and docs/pretraining.md name every setting there is, with its default, and their commands work."""

import dataclasses
import re
import shlex
import typing

import yaml
from helpers_cli import ROOT

import tandem
from tandem.cli.main import parser
from tandem.config.load import build
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import Recipe
from tandem.config.rewards import RewardsConfig

TEXT = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
PRETRAINING = (ROOT / "docs" / "pretraining.md").read_text(encoding="utf-8")


def documented(text: str) -> dict[str, dict[str, str]]:
    """The keys and defaults in the tables, by the section that their headline names."""
    found: dict[str, dict[str, str]] = {}
    section = None
    for line in text.splitlines():
        if line.startswith("#"):
            headline = re.match(r"#+ `([\w.]+)`", line)
            section = headline[1] if headline else None
        elif section is not None and line.startswith("| `"):
            key, default = (cell.strip(" `") for cell in line.split("|")[1:3])
            assert key not in found.setdefault(section, {}), key
            found[section][key] = default
    return found


def sections(section: type, where: str = "") -> dict[str, type]:
    """Every dataclass of the recipe by its dotted section."""
    found = {where: section} if where else {}
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        for hint in inside(hints[field.name]):
            if dataclasses.is_dataclass(hint):
                found |= sections(typing.cast(type, hint), f"{where}.{field.name}".lstrip("."))
    return found


def inside(hint: object) -> list[object]:
    """``hint`` and every type that it is made of: of ``tuple[X, ...] | None``, X too."""
    return [hint, *(part for argument in typing.get_args(hint) for part in inside(argument))]


def shown(field: "dataclasses.Field[object]") -> str:
    """A default as the document writes it."""
    default = field.default
    if default is dataclasses.MISSING:
        return "required" if field.default_factory is dataclasses.MISSING else "empty"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, float):
        return f"{default:g}"
    return str(default) if isinstance(default, int | str) and default != "" else "empty"


def keys(found: dict[str, type]) -> dict[str, dict[str, str]]:
    return {name: {field.name: shown(field) for field in dataclasses.fields(section)} for name, section in found.items()}


def test_every_key_of_every_section_stands_there_with_its_default_and_no_other() -> None:
    expected = keys(sections(Recipe))
    assert documented(TEXT) == expected
    assert sum(map(len, expected.values())) > 100


def test_keys_of_pretraining_that_other_recipes_lack_stand_in_its_own_document() -> None:
    shared = set(sections(Recipe).values())
    own = {name: section for name, section in sections(PretrainRecipe).items() if section not in shared}
    assert documented(PRETRAINING) == keys(own) and "data.train" in own


def test_commands_of_pretraining_are_in_order() -> None:
    lines = [line for block in re.findall(r"```sh\n(.*?)```", PRETRAINING, re.S) for line in block.splitlines()]
    commands = []
    for line in lines:
        program, *words = shlex.split(line, comments=True)
        assert program == "tandem"
        commands.append(parser().parse_args(words).command)
    assert commands == ["tokenize", "tokenize", "train", "resume", "tokenize", "train"]


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
