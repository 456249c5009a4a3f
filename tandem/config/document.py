"""Generates the tables of ``docs/recipes.md`` and ``docs/gateway.md``: every section, key, default and meaning, from the configuration classes.

``python -m tandem.config.document docs/recipes.md docs/gateway.md`` rewrites everything below ``MARKER`` and keeps what is above.
"""

import dataclasses
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

from tandem.config.describe import field_descriptions
from tandem.config.gateway import GatewayConfig
from tandem.config.load import refused_keys
from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import Recipe

MARKER = "# All keys"
ABOUT = "Generated from the classes in `tandem/config`; `CONTRIBUTING.md` says how."


class Section(typing.NamedTuple):
    """A dataclass under its dotted name. ``refused``: its keys that the enclosing section sets itself, with the reasons."""

    name: str
    kind: type
    refused: Mapping[str, str]


def document(text: str) -> str:
    """Returns the document ``text`` with the tables of all sections below the line ``MARKER``. Raises ``ValueError`` if the line is
    missing."""
    rollouts = sections(Recipe)
    shared = {section.kind for section in rollouts}
    data = sections(PretrainRecipe)
    same = ", ".join(f"`{section.name}`" for section in data if section.kind in shared and "." not in section.name)
    blocks = [
        ABOUT,
        "# Reinforcement learning",
        _refusals("Keys that reinforcement learning does not use and refuses", Recipe),
        *(block for section in rollouts for block in _section(section)),
        "# Pretraining, supervised fine-tuning and DPO",
        f"The sections {same} are described above.",
        _refusals("Keys that training on data does not use and refuses", PretrainRecipe),
        *(block for section in data if section.kind not in shared for block in _section(section)),
    ]
    return _below_marker(text, blocks)


def gateway_document(text: str) -> str:
    """Returns the document ``text`` with the tables of the gateway's file below the line ``MARKER``. Raises ``ValueError`` if the line is missing."""
    own = [Section("the file", GatewayConfig, {}), *sections(GatewayConfig)]
    return _below_marker(text, [ABOUT, *(block for section in own for block in _section(section))])


def _below_marker(text: str, blocks: list[str]) -> str:
    guide, marker, _ = text.partition(f"{MARKER}\n")
    if not marker:
        raise ValueError(f"the document has no line '{MARKER}' to write the tables below")
    return guide + marker + "\n" + "\n\n".join(block for block in blocks if block) + "\n"


def sections(recipe: type) -> list[Section]:
    """Returns the sections of the recipe class ``recipe`` in the order of its fields, each followed by those inside it."""
    return list(_sections(recipe, "", {}))


def _sections(kind: type, where: str, refused: Mapping[str, str]) -> Iterator[Section]:
    if where:
        refused = {**refused, **refused_keys(kind)}
        yield Section(where, kind, {key: reason for key, reason in refused.items() if "." not in key})
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        inside = {key.removeprefix(f"{field.name}."): reason for key, reason in refused.items() if key.startswith(f"{field.name}.")}
        for inner in _types_in(hints[field.name]):
            if dataclasses.is_dataclass(inner):
                yield from _sections(typing.cast(type, inner), f"{where}.{field.name}".lstrip("."), inside)


def _types_in(hint: object) -> Iterator[object]:
    """Yields ``hint`` and every type nested in it: of ``tuple[X, ...] | None``, X too."""
    yield hint
    for argument in typing.get_args(hint):
        yield from _types_in(argument)


def _section(section: Section) -> Iterator[str]:
    yield f"{'#' * (2 + section.name.count('.'))} `{section.name}`"
    yield " ".join((section.kind.__doc__ or "").split())
    descriptions = field_descriptions(section.kind)
    rows = ["| Key | Default | Meaning |", "| --- | --- | --- |"]
    for field in dataclasses.fields(section.kind):  # type: ignore[arg-type]
        if field.name not in section.refused:
            meaning = descriptions[field.name].replace("|", "\\|")
            rows.append(f"| `{field.name}` | {_default(field)} | {meaning} |")
    yield "\n".join(rows)
    yield _refused_list("Keys that this section refuses", section.refused)


def _refusals(what: str, recipe: type) -> str:
    return _refused_list(what, refused_keys(recipe))


def _refused_list(what: str, refused: Mapping[str, str]) -> str:
    return "\n".join([f"{what}:", "", *(f"- `{key}`: {reason}." for key, reason in refused.items())]) if refused else ""


def _default(field: "dataclasses.Field[object]") -> str:
    default = field.default
    if default is dataclasses.MISSING:
        return "required" if field.default_factory is dataclasses.MISSING else "empty"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, float):
        return f"`{default:g}`"
    if isinstance(default, str) and "\n" in default:
        return " ".join(f"`{line}`" for line in default.splitlines() if line)
    return f"`{default}`" if isinstance(default, int | str) and default != "" else "empty"


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        write = gateway_document if path.name == "gateway.md" else document
        path.write_text(write(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
