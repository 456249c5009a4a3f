"""The tables of names for users of TRL, verl and vLLM name keys that exist."""

import dataclasses
import re
import typing

import pytest
from helpers_cli import ROOT

from tandem.config.engine import EngineArgs
from tandem.config.recipe import Recipe

HOW_TO = ROOT / "docs" / "how-to"


def names(document: str, column: int) -> list[str]:
    """Returns what is in backticks in a column of the document's tables."""
    rows = [line.split("|") for line in (HOW_TO / document).read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[column])]


def has_key(kind: type, path: list[str]) -> bool:
    fields = typing.get_type_hints(kind)
    if path[0] not in fields:
        return False
    inner = next((part for part in (fields[path[0]], *typing.get_args(fields[path[0]])) if dataclasses.is_dataclass(part)), None)
    return len(path) == 1 or (isinstance(inner, type) and has_key(inner, path[1:]))


@pytest.mark.parametrize("document", ["from-trl.md", "from-verl.md"])
def test_every_key_in_a_table_of_names_is_a_key_of_a_recipe(document: str) -> None:
    keys = [name for name in names(document, 2) if "." in name]
    assert len(keys) > 20 and [key for key in keys if not has_key(Recipe, key.split("."))] == []
    assert not has_key(Recipe, ["algorithm", "group_sise"])


def test_every_name_that_vllm_shares_is_a_field_of_engine_args() -> None:
    shared = [name for name in names("from-vllm.md", 1) + names("from-vllm.md", 2) if name.isidentifier() and name.islower()]
    assert len(shared) > 15 and [name for name in shared if name not in {field.name for field in dataclasses.fields(EngineArgs)}] == ["num_gpu_blocks_override"]
