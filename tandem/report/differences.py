"""What a comparison of runs needs of them beside their curves: short names that differ, and the keys of their recipes that do."""

from collections.abc import Sequence
from pathlib import Path

from tandem.report.hidden import shown_values
from tandem.report.run_facts import RunFacts
from tandem.types import UserError

MOST_RUNS = 16
"""Runs that can be told apart on one page."""
_NOT_COMPARED = ("run.name", "run.directory")


def short_names(directories: Sequence[Path]) -> list[str]:
    """Returns the shortest ends of the paths that differ."""
    whole = [directory.resolve().parts for directory in directories]
    if len(set(whole)) < len(whole):
        twice = next(path for path in whole if whole.count(path) > 1)
        raise UserError(f"'{Path(*twice)}' is named twice; name runs to compare it with")
    length = next(n for n in range(1, max(map(len, whole)) + 1) if len({parts[-n:] for parts in whole}) == len(whole))
    return ["/".join(parts[-length:]).lstrip("/") for parts in whole]


def differing(runs: Sequence[RunFacts]) -> list[tuple[str, list[str]]]:
    """Returns the keys whose values differ between the recipes, each with its values."""
    recipes = [shown_values(run.recipe or {}) for run in runs]
    keys = [key for key in dict.fromkeys(key for recipe in recipes for key in recipe) if key not in _NOT_COMPARED]
    rows = [(key, [recipe.get(key, "-") for recipe in recipes]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]
