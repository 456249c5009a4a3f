"""What the page of a run says above its curves and in its tables, as plain data."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tandem.dashboard.open_run import OpenRun
from tandem.report.alerts import ALERTS, alert_lines, marks
from tandem.report.cards import cards, memory_of_phases, status, totals_of_columns
from tandem.report.charts import TRAINED, Curve, defined_curves, first_chart
from tandem.report.columns import Columns
from tandem.report.differences import differing
from tandem.report.hidden import shown_values, without_secrets
from tandem.report.phases import PhaseFigures, phase_cells
from tandem.report.run_facts import RunFacts
from tandem.report.series import Chart
from tandem.runtime.records.checkpoint_tiers import EVENT_LOADED
from tandem.runtime.records.replays import read_replays
from tandem.runtime.records.run_lock import lock_holder
from tandem.runtime.records.tracing import traced_steps
from tandem.types import RunError

PHASE_SECONDS = "timing_s/"
MOST_EVENTS = 2000
MOST_REPLAYS = 50
_STEP_SECONDS, _MOVED = "timing_s/step", "memory/moved/"
_NOTHING: Mapping[str, Any] = {
    "status": ["not known", "quiet"], "headline": "", "alerts": [], "cards": [], "memory": [], "marks": [], "events": [], "commands": [], "recipe": None,
    "machine": {}, "replays": [], "examples": [], "samples": None, "moves": [], "tiers": [], "compared": [],
}  # fmt: skip
"""Of a run whose journal cannot be read."""


def overview(run: OpenRun) -> dict[str, Any]:
    """Returns all of the page that is not a curve, a sample, a phase or a log."""
    facts, problem = run.facts()
    with run.columns() as columns:
        shown: dict[str, Any] = {
            "name": run.name, "path": str(run.directory), "live": lock_holder(run.directory), "rows": len(columns), "problem": problem,
            "sections": sections([facts] if facts else [], [columns]), "phases": phase_keys(columns), "phase_times": phase_times(columns),
            "traced": traced_steps(run.directory / "traces"),
        }  # fmt: skip
        if facts is None:
            return {**_NOTHING, **shown}
        measured = [(key, columns.extremes(key)[1]) for key in columns.keys if key.startswith("memory/")]
        shown["cards"] = [asdict(card) for card in cards(facts, totals_of_columns(columns))]
        shown["moves"] = moves(columns)
        shown["memory"] = [asdict(each) for each in memory_of_phases(measured, facts.predicted_memory)]
    machine, last_samples = _machine(run)
    return {
        **shown, "status": list(status(facts)), "headline": facts.headline, "alerts": alert_lines(facts), "marks": marks(facts),
        "commands": list(facts.commands), "events": events(facts), "recipe": _recipe(facts), "machine": machine, "replays": replays(run),
        "examples": _examples(facts), "samples": last_samples, "tiers": tiers(facts),
        "compared": phase_cells([PhaseFigures(**each) for each in facts.phases]),
    }  # fmt: skip


def sections(facts: Sequence[RunFacts], all_columns: Sequence[Columns]) -> list[dict[str, Any]]:
    """Returns the charts by section: which metrics each has, and the evaluations, of which there are few."""
    keys = {key for columns in all_columns for key in columns.keys}
    is_data = "train/loss" in keys
    title, trained, name = TRAINED[is_data]
    found: dict[str, list[dict[str, Any]]] = {title: []}
    # The rows that facts have are the last ones, so the curve of training is drawn from its metric.
    first = first_chart(facts, is_data=is_data)
    evaluated = [each for each in first.series if each.x is not None]
    if trained in keys or evaluated:
        found[title].append(_first(first, [{"key": trained, "name": name}] if trained in keys else [], evaluated))
    for section, curves in defined_curves(keys, is_data=is_data).items():
        found.setdefault(section, []).extend(shown for curve in curves if (shown := _curve(curve, keys, all_columns)))
    return [{"title": section, "charts": charts} for section, charts in found.items() if charts]


def _first(chart: Chart, series: list[dict[str, str]], evaluated: Sequence[Any]) -> dict[str, Any]:
    points = [{"name": each.name, "run": each.run, "x": list(each.x), "y": list(each.y), "error": each.error} for each in evaluated]
    return {
        "title": chart.title, "unit": chart.unit, "floor": chart.floor, "ceiling": chart.ceiling, "series": series, "points": points,
        "lines": [{"y": y, "name": name} for y, name in chart.lines],
    }  # fmt: skip


def _curve(curve: Curve, keys: set[str], all_columns: Sequence[Columns]) -> dict[str, Any] | None:
    there = [{"key": key, "name": name} for key, name in curve.keys if key in keys]
    if curve.rare:
        there = [each for each in there if any(columns.extremes(each["key"]) != (0.0, 0.0) for columns in all_columns)]
    if not there:
        return None
    return {"title": curve.title, "unit": curve.unit, "floor": curve.floor, "ceiling": curve.ceiling, "series": there, "points": [], "lines": []}


def phase_keys(columns: Columns) -> list[dict[str, str]]:
    """Returns the metrics of the seconds of each phase, the longest phase first."""
    keys = [key for key in columns.keys if key.startswith(PHASE_SECONDS) and key != _STEP_SECONDS]
    seconds = {key: sum(columns.finite(key)) for key in keys}
    return [{"key": key, "name": key.removeprefix(PHASE_SECONDS).replace("_", " ")} for key in sorted(keys, key=lambda key: -seconds[key])]


def phase_times(columns: Columns) -> list[tuple[str, float, float, float]]:
    """Returns of each phase its name and the seconds of all steps, of the median and of the longest, the longest phase first."""
    times = []
    for each in phase_keys(columns):
        ordered = sorted(columns.finite(each["key"]))
        times.append((each["name"], math.fsum(ordered), ordered[len(ordered) // 2], ordered[-1]))
    return times


def moves(columns: Columns) -> list[dict[str, Any]]:
    """Returns the moves of a pod's residents, over all steps in which each was made."""
    moved = []
    for key in sorted(key for key in columns.keys if key.startswith(_MOVED) and key.endswith("/bytes")):
        name, move, _ = key.removeprefix(_MOVED).split("/")
        sizes, seconds = columns.finite(key), columns.finite(f"{_MOVED}{name}/{move}/seconds")
        moved.append({"resident": name, "move": move, "steps": len(sizes), "bytes": math.fsum(sizes), "seconds": math.fsum(seconds)})
    return moved


def events(facts: RunFacts) -> list[dict[str, Any]]:
    """Returns the newest events, the newest first. Those after which results may not be what they should be are ``bad``."""
    return [
        {"time_s": event.get("time_s"), "kind": event["kind"], "detail": without_secrets("", event["detail"]), "bad": event["kind"] in ALERTS}
        for event in reversed(facts.events[-MOST_EVENTS:])
    ]


def tiers(facts: RunFacts) -> list[dict[str, Any]]:
    """Returns what was written to each tier of checkpoints and what was loaded from it, the nearest tier first."""
    loads = [event["detail"] for event in facts.events if event["kind"] == EVENT_LOADED]
    return [
        {
            **asdict(state), "loads": sum(each["tier"] == state.tier for each in loads),
            "load_seconds": sum(each["seconds"] for each in loads if each["tier"] == state.tier),
        }
        for state in facts.tiers
    ]  # fmt: skip


def replays(run: OpenRun) -> list[dict[str, Any]]:
    """Returns what the newest replays of the run's steps found, the newest first."""
    return [
        {
            "time_s": each.get("time_s"), "step": each["step"], "version": str(each.get("version", "")),
            "parts": [_part(part) for part in each["parts"] if isinstance(part, dict)],
        }
        for each in read_replays(run.directory, MOST_REPLAYS)
    ]


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    lines = [str(line)[:1000] for line in part.get("differences", ())]
    return {"part": str(part.get("part")), "count": part.get("count"), "unequal": part.get("unequal"), "how": str(part.get("how")), "differences": lines}


def _recipe(facts: RunFacts) -> dict[str, Any] | None:
    if facts.recipe is None:
        return None
    values, defaults = shown_values(facts.recipe), shown_values(facts.defaults)
    changed = [[key, values[key], defaults.get(key, "-")] for key in values if values[key] != defaults.get(key)]
    return {"changed": changed, "same": [[key, value] for key, value in values.items() if value == defaults.get(key)]}


def _examples(facts: RunFacts) -> list[dict[str, Any]]:
    after = {example["prompt"]: example for example in facts.examples_after}
    return [{"prompt": e["prompt"], "before": _completion(e), "after": _completion(after.get(e["prompt"]))} for e in facts.examples_before]


def _completion(example: Any) -> dict[str, Any] | None:
    return None if example is None else {"text": str(example["completion"])[:2000], "correct": bool(example.get("correct"))}


def _machine(run: OpenRun) -> tuple[dict[str, str], int | None]:
    """Returns what the journal says of the machine that the run computes on, and the newest step that has samples."""
    try:
        with run.journal() as journal:
            numerics, mesh, device = journal.get("numerics") or {}, journal.get("mesh") or {}, journal.get("device")
            residents, starts, last = journal.get("residents") or {}, journal.incarnation, journal.last_journalled_step()
    except RunError:
        return {}, None
    found = {"device": device, **{key.replace("_", " "): value for key, value in numerics.items()}, **{f"{key} ranks": value for key, value in mesh.items()}}
    found |= {"residents": residents.get("plan"), "starts of the trainer": starts or None}
    return {key: str(value) for key, value in found.items() if value is not None}, last


def comparison(runs: Sequence[OpenRun]) -> dict[str, Any]:
    """Returns the charts that several runs share, their results, and what differs in their recipes."""
    known = [(run, *run.facts()) for run in runs]
    facts = [found for _, found, _ in known if found is not None]
    results, all_columns = [], []
    for run, found, problem in known:
        with run.columns() as columns:
            all_columns.append(columns)
            totals, times = totals_of_columns(columns), phase_times(columns)
        results.append({
            "name": run.name, "steps": totals.steps, "seconds": totals.seconds, "speed": totals.speed, "headline": found.headline if found else "",
            "status": list(status(found)) if found else ["not known", "quiet"], "problem": problem, "live": lock_holder(run.directory) is not None,
            "phase_times": {name: median for name, _, median, _ in times},
        })  # fmt: skip
    whole = len(facts) == len(runs)
    return {"results": results, "sections": sections(facts if whole else [], all_columns), "differences": differing(facts) if whole else []}
