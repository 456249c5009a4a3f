"""Writes a page that lays several runs side by side: their curves in the same charts, and what differs in their recipes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tandem.report.cards import median
from tandem.report.charts import phase_seconds, sections
from tandem.report.page import new_page, write_page
from tandem.report.run_facts import RunFacts, read_facts
from tandem.report.series import column
from tandem.report.tables import alerts, escaped, shown_values, table
from tandem.types import UserError

MOST_RUNS = 16
_NOT_COMPARED = ("run.name", "run.directory")


def compare_runs(directories: Sequence[Path], path: Path) -> Path:
    """Writes the page that compares the runs in ``directories`` to ``path`` and returns it. Raises ``UserError`` if one is not a run."""
    if len(directories) > MOST_RUNS:
        raise UserError(f"{len(directories)} runs cannot be told apart on one page; name at most {MOST_RUNS}")
    runs = [read_facts(directory, with_samples=False) for directory in directories]
    names = _names(directories)
    write_page(compare_page([replace(run, name=name) for run, name in zip(runs, names, strict=True)]), path)
    return path


def compare_page(runs: Sequence[RunFacts]) -> str:
    """Returns the page of several runs, whose names differ."""
    by_section = sections(runs)
    page = new_page(" · ".join(run.name for run in runs), [chart for charts in by_section.values() for chart in charts])
    page.add("Results", _results(runs))
    page.add("Differences of the recipes", differences(runs))
    for title, charts in by_section.items():
        page.add(title, page.grid(charts))
    page.add("Median time of each phase", _phases(runs))
    return page.html("comparison", "".join(map(alerts, runs)), [(run.name, run.rows) for run in runs])


def _names(directories: Sequence[Path]) -> list[str]:
    """Returns the shortest ends of the paths that differ."""
    whole = [directory.resolve().parts for directory in directories]
    if len(set(whole)) < len(whole):
        twice = next(path for path in whole if whole.count(path) > 1)
        raise UserError(f"'{Path(*twice)}' is named twice; name runs to compare it with")
    length = next(n for n in range(1, max(map(len, whole)) + 1) if len({parts[-n:] for parts in whole}) == len(whole))
    return ["/".join(parts[-length:]).lstrip("/") for parts in whole]


def differences(runs: Sequence[RunFacts]) -> str:
    """Returns a table of the keys whose values differ between the recipes."""
    rows = [[f"<code>{escaped(key)}</code>", *(f"<code>{escaped(value)}</code>" for value in values)] for key, values in differing(runs)]
    return table(("key", *(run.name for run in runs)), rows, numbers=False) if rows else "<p class='quiet'>The recipes are the same.</p>"


def differing(runs: Sequence[RunFacts]) -> list[tuple[str, list[str]]]:
    """Returns the keys whose values differ between the recipes, each with its values."""
    recipes = [shown_values(run.recipe or {}) for run in runs]
    keys = [key for key in dict.fromkeys(key for recipe in recipes for key in recipe) if key not in _NOT_COMPARED]
    rows = [(key, [recipe.get(key, "-") for recipe in recipes]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _results(runs: Sequence[RunFacts]) -> str:
    rows = []
    for number, run in enumerate(runs):
        swatch = f"<i class='swatch' style='background:var(--c{number % 8})'></i>"
        speed = median(column(run.rows, "perf/tokens_per_s"))
        seconds = sum(value for value in column(run.rows, "timing_s/step") if value is not None)
        ended = "not finished" if run.ended is None else "" if run.reached is None else "target reached" if run.reached else "target not reached"
        rows.append([
            f"{swatch}{escaped(run.name)}", str(run.rows[-1]["step"] + 1 if run.rows else 0), f"{seconds:,.0f}", "-" if speed is None else f"{speed:,.0f}",
            escaped(run.headline), escaped(ended),
        ])  # fmt: skip
    return table(("run", "steps", "seconds", "tokens per second", "evaluation", ""), rows, numbers=False)


def _phases(runs: Sequence[RunFacts]) -> str:
    seconds: list[Mapping[str, list[float | None]]] = [phase_seconds(run.rows) for run in runs]
    rows = []
    for phase in dict.fromkeys(phase for each in seconds for phase in each):
        medians = [median(each.get(phase, [])) for each in seconds]
        rows.append([escaped(phase.replace("_", " ")), *("-" if value is None else f"{value:.3f}" for value in medians)])
    return table(("phase, s", *(run.name for run in runs)), rows) if rows else ""
