"""The values of the registry: versions of models, where they come from, and what differs between two."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from tandem.config.leaves import leaves
from tandem.types import UserError

Stage = Literal["none", "staging", "production", "archived"]
STAGES: tuple[Stage, ...] = ("none", "staging", "production", "archived")


@dataclass(frozen=True, slots=True)
class NewVersion:
    """What is entered: the committed folder ``path`` with the digest over all of its bytes, after ``step`` optimizer steps.

    Lineage: ``run`` (its folder), ``recipe`` (resolved), ``data`` (digest by address of each dataset), ``parent`` (the model that
    training began from), ``metrics`` (the newest there are)."""

    name: str
    path: str
    digest: str
    step: int
    run: str
    recipe: Mapping[str, Any]
    data: Mapping[str, str]
    parent: str
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Version:
    """Version ``number`` (from 1) of a model, entered at ``created_s`` (unix seconds)."""

    number: int
    stage: Stage
    created_s: float
    entry: NewVersion

    @property
    def reference(self) -> str:
        return f"{self.entry.name}/{self.number}"

    def to_json(self) -> dict[str, Any]:
        """As ``tandem models --json`` prints it."""
        entry = self.entry
        return {
            "name": entry.name, "version": self.number, "stage": self.stage, "created_s": self.created_s, "path": entry.path,
            "digest": entry.digest, "step": entry.step, "run": entry.run, "parent": entry.parent, "metrics": dict(entry.metrics),
            "data": dict(entry.data), "recipe_digest": recipe_digest(entry.recipe), "recipe": dict(entry.recipe),
        }  # fmt: skip


class Registry(Protocol):
    """Stores and lists model versions."""

    def register(self, entry: NewVersion) -> Version:
        """The version of ``entry``: a new one, or the one that has its digest already."""
        ...

    def versions(self, name: str = "") -> list[Version]:
        """Those of the model ``name``, or of all, by name and number."""
        ...

    def promote(self, version: Version, stage: Stage) -> Version:
        """Puts ``version`` into ``stage``; its files are verified first for staging and production. The version that was in production before is
        archived when another is put there."""
        ...

    def check(self) -> None:
        """Raises ``RunError`` if a row of the registry is damaged."""
        ...


def recipe_digest(recipe: Mapping[str, Any]) -> str:
    """BLAKE2b-128 of a recipe, in hexadecimal."""
    return hashlib.blake2b(json.dumps(recipe, sort_keys=True).encode(), digest_size=16).hexdigest()


def stage_named(text: str) -> Stage:
    """Raises ``UserError``."""
    for stage in STAGES:
        if stage == text:
            return stage
    raise UserError(f"the stage '{text}' is not one of {', '.join(STAGES)}")


def find(registry: Registry, reference: str) -> Version:
    """Returns the version ``NAME/3``, ``NAME@production`` (the newest in that stage) or ``NAME`` (the newest). Raises ``UserError`` if it does not exist."""
    match = re.fullmatch(r"([^/@]+)(?:/(\d+)|@(\w+))?", reference)
    if match is None:
        raise UserError(f"'{reference}' names no version; write NAME/3, NAME@production, or NAME for the newest")
    name, number, stage = match.groups()
    versions = registry.versions(name)
    if not versions:
        known = sorted({version.entry.name for version in registry.versions()})
        raise UserError(f"the registry has no model '{name}'; it has {', '.join(known) or 'none'}")
    if stage is not None:
        stage_named(stage)
    matching = [v for v in versions if number in (None, str(v.number)) and stage in (None, v.stage)]
    if not matching:
        raise UserError(f"the model '{name}' has no version '{reference}'; 'tandem models list {name}' shows those it has")
    return matching[-1]


class Difference(NamedTuple):
    """``left`` and ``right`` are ``None`` where a version has nothing there."""

    what: str
    left: Any
    right: Any


def differences(left: Version, right: Version) -> list[Difference]:
    """What differs between two versions: weights, step, parent, data, every key of the recipe, every metric."""
    a, b = left.entry, right.entry
    flat_a, flat_b = (
        {
            "weights": entry.digest, "step": entry.step, "parent": entry.parent,
            **{f"data {name}": digest for name, digest in entry.data.items()},
            **{f"recipe {key}": value for key, value in leaves(entry.recipe)},
            **{f"metric {name}": value for name, value in entry.metrics.items()},
        }
        for entry in (a, b)
    )  # fmt: skip
    names = dict.fromkeys([*flat_a, *flat_b])
    return [Difference(name, flat_a.get(name), flat_b.get(name)) for name in names if flat_a.get(name) != flat_b.get(name)]
