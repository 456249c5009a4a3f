"""Every code block of the documents is a command that is accepted, a program that names what exists, or part of a recipe."""

import ast
import importlib
import re
import shlex
from itertools import takewhile
from pathlib import Path

import pytest
import walk
import yaml
from code_blocks import PLAIN, SHELL, Block, code_blocks

from tandem.cli.main import parser, with_form
from tandem.config.load import read_yaml
from tandem.config.recipe import load_config, recipe_of

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")})
BLOCKS = [block for document in DOCUMENTS for block in code_blocks(document)]
WRITTEN = {block.how.removeprefix("file ") for block in BLOCKS if block.how.startswith("file ")}


def commands(block: Block) -> list[list[str]]:
    """Returns the words of each command of Tandem in a shell block."""
    lines = block.text.replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines if re.match(r"(\.venv/bin/)?tandem ", line)]
    return [words[1:] for words in split]


def test_every_document_with_a_block_that_is_run_is_walked() -> None:
    run = {block.document for block in BLOCKS if block.language in (*SHELL, "python") and not block.how.startswith("no,")}
    assert run == {ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in walk.DOCUMENTS)}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_of_a_known_kind_and_one_that_is_not_run_says_why(block: Block) -> None:
    how, _, rest = block.how.partition(" ")
    assert block.language in (*SHELL, *PLAIN, "python", "yaml")
    assert how in ("", "short", "no,", "file", "server") and (how in ("", "short")) == (not rest)
    assert block.language in (*SHELL, "python") or how in ("", "file", "no,")


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in SHELL], ids=str)
def test_commands_are_accepted(block: Block) -> None:
    for words in commands(block):
        options, overrides = parser().parse_known_args(with_form(list(takewhile(lambda word: word not in ("&", ">", "|"), words))))
        assert not overrides or (options.takes_overrides and all(text.startswith("--") and "=" in text for text in overrides)), overrides
        if options.command == "train" and options.recipe not in WRITTEN:
            load_config(ROOT / options.recipe if options.recipe.endswith(".yaml") else options.recipe, overrides)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "python"], ids=str)
def test_programs_import_what_exists(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "tandem":
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml" and not block.how.startswith("no,")], ids=str)
def test_yaml_is_a_recipe_or_part_of_one(block: Block) -> None:
    sections = yaml.safe_load(block.text)
    recipe = {} if block.how else read_yaml(ROOT / "recipes" / "sort.yaml")
    for section, keys in sections.items():
        recipe[section] = {**recipe.get(section, {}), **keys} if isinstance(keys, dict) else keys
    recipe_of(recipe)
