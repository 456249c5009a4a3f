"""What the pages ask for: small answers as plain data, for HTTP and for a page that is written to a file."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from tandem.dashboard.curves import curves
from tandem.dashboard.hardware import hardware, hardware_curves
from tandem.dashboard.logs import log_files, log_part
from tandem.dashboard.nodes import nodes
from tandem.dashboard.overview import comparison, overview
from tandem.dashboard.phase_answers import phase_detail, phase_window, trace_window
from tandem.dashboard.query import Query, axis, integer, number, text
from tandem.dashboard.runs import Runs
from tandem.dashboard.samples import Filter, one_sample, search, step_samples
from tandem.report.differences import MOST_RUNS
from tandem.types import UserError

MOST_LINES = 500
"""Of the charts of hardware in one request: those of several ranks and workers in two charts."""
Answer = Callable[[Runs, Query], Any]


def to_json(value: Any) -> bytes:
    """Returns ``value`` as JSON, with words in the place of numbers that JSON has not."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, default=str).encode()
    except ValueError:
        return json.dumps(_without_nan(value), separators=(",", ":"), allow_nan=False, default=str).encode()


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _without_nan(inner) for key, inner in value.items()}
    return [_without_nan(inner) for inner in value] if isinstance(value, list | tuple) else value


def _runs(runs: Runs, query: Query) -> Any:
    listed, count = runs.list()
    return {"folder": str(runs.folder), "runs": listed, "count": count}


def _run(runs: Runs, query: Query) -> Any:
    return overview(runs.open(text(query, "run")))


def _curves(runs: Runs, query: Query) -> Any:
    run = runs.open(text(query, "run"))
    keys = query.get("key", ())
    return curves(run, keys, number(query, "from"), number(query, "to"), integer(query, "points") or 1000, axis(query))


def _hardware(runs: Runs, query: Query) -> Any:
    return hardware(runs.open(text(query, "run")))


def _hardware_curves(runs: Runs, query: Query) -> Any:
    keys = query.get("key", ())[:MOST_LINES]
    return hardware_curves(runs.open(text(query, "run")), keys, number(query, "from"), number(query, "to"), integer(query, "points") or 200)


def _nodes(runs: Runs, query: Query) -> Any:
    return nodes(runs.open(text(query, "run")))


def _compare(runs: Runs, query: Query) -> Any:
    names = list(dict.fromkeys(query.get("run", ())))
    if not 2 <= len(names) <= MOST_RUNS:
        raise UserError(f"{len(names)} runs are named; a comparison has 2 to {MOST_RUNS}")
    return comparison([runs.open(name) for name in names])


def _phases(runs: Runs, query: Query) -> Any:
    return phase_window(runs.open(text(query, "run")), number(query, "from"), number(query, "to"), integer(query, "step"))


def _phase(runs: Runs, query: Query) -> Any:
    return phase_detail(runs.open(text(query, "run")), integer(query, "id") or 0)


def _trace(runs: Runs, query: Query) -> Any:
    return trace_window(runs.open(text(query, "run")), integer(query, "step") or 0)


def _filter(query: Query) -> Filter:
    return Filter(text(query, "text", ""), text(query, "only", ""))


def _samples(runs: Runs, query: Query) -> Any:
    offset, limit = integer(query, "offset") or 0, min(integer(query, "limit") or 20, 100)
    return step_samples(runs.open(text(query, "run")), integer(query, "step"), _filter(query), offset, limit)


def _search(runs: Runs, query: Query) -> Any:
    same_id, same_step = text(query, "same_id", ""), integer(query, "same_step")
    same_as = (same_step, same_id) if same_id and same_step is not None else None
    return search(runs.open(text(query, "run")), _filter(query), integer(query, "before"), same_as, min(integer(query, "limit") or 40, 200))


def _sample(runs: Runs, query: Query) -> Any:
    return one_sample(runs.open(text(query, "run")), integer(query, "step") or 0, text(query, "id"))


def _logs(runs: Runs, query: Query) -> Any:
    return {"files": log_files(runs.open(text(query, "run")).directory)}


def _log(runs: Runs, query: Query) -> Any:
    return log_part(runs.open(text(query, "run")).directory, text(query, "file"), integer(query, "before"), text(query, "text", ""))


ANSWERS: Mapping[str, Answer] = {
    "runs": _runs, "run": _run, "curves": _curves, "compare": _compare, "phases": _phases, "phase": _phase, "trace": _trace, "samples": _samples,
    "hardware": _hardware, "hardware_curves": _hardware_curves, "search": _search, "sample": _sample, "logs": _logs, "log": _log,
    "nodes": _nodes,
}  # fmt: skip
