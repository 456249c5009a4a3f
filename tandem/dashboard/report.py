"""Writes the report of runs: the dashboard's page in one file, as the runs are now. Imports no web server."""

from collections.abc import Sequence
from pathlib import Path

from tandem.dashboard.answers import to_json
from tandem.dashboard.frozen import frozen_page
from tandem.dashboard.open_run import JOURNAL, OpenRun
from tandem.dashboard.overview import comparison
from tandem.dashboard.page_file import page_file, write_page
from tandem.dashboard.runs import listed_run, stages
from tandem.report.differences import MOST_RUNS, short_names
from tandem.types import RunError, UserError


def write_report(directories: Sequence[Path], path: Path) -> Path:
    """Writes the page of the run in ``directories``, or of several with their comparison, to ``path`` and returns it. Raises ``UserError`` where one is not a
    run, is named twice, or there are too many; ``RunError`` where a journal is damaged."""
    for directory in directories:
        if not (directory / JOURNAL).is_file():
            raise UserError(f"'{directory}' is not a run: it has no {JOURNAL}; name a folder under runs/")
    if len(directories) > MOST_RUNS:
        raise UserError(f"{len(directories)} runs cannot be told apart on one page; name at most {MOST_RUNS}")
    names = [directories[0].resolve().name] if len(directories) == 1 else short_names(directories)
    runs = [OpenRun(name, directory) for name, directory in zip(names, directories, strict=True)]
    for run in runs:
        facts, problem = run.facts()
        if facts is None:
            raise RunError(problem)
    compared = comparison(runs) if len(runs) > 1 else None
    # Those of the stage before reinforcement learning are runs of their own.
    whole = [each for run in runs for each in (run, *(OpenRun(f"{run.name}/{name}", folder) for name, folder in stages(run.directory).items()))]
    listed = [{**listed_run(each.name, each.directory), "live": False} for each in whole]
    data = frozen_page(whole, None if compared is None else _ended(compared), listed, len(runs))
    write_page(page_file(" · ".join(names), data, to_json), path)
    return path


def _ended(compared: dict[str, object]) -> dict[str, object]:
    results = compared["results"]
    assert isinstance(results, list)
    return {**compared, "results": [{**result, "live": False} for result in results]}
