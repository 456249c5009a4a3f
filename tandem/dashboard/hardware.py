"""The hardware of a run over time, from the metrics database next to its journal: queries of PromQL, as curves of the page."""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from tandem.dashboard.open_run import OpenRun
from tandem.metrics_database.answers import Answers
from tandem.metrics_database.promql.evaluate import Labels
from tandem.metrics_database.promql.syntax import NAME, Matcher
from tandem.metrics_database.store import FILE, MetricsReader
from tandem.report.series import finite
from tandem.types import RunError

MOST_MOMENTS = 200
SAMPLES_OF_RATE = 4
"""Scrapes that a rate is over, at least."""
DEFAULT_INTERVAL_S = 15.0
"""Of a database with a single scrape."""
_PLACES = 24
"""Places at which the database is asked which series it has."""


@dataclass(frozen=True, slots=True)
class Panel:
    """``query``: with ``$range`` where a range is. ``legend``: the labels that name a line. ``unit``: as the page has it."""

    title: str
    query: str
    legend: tuple[str, ...]
    unit: str = ""
    ceiling: float | None = None


PANELS = (
    Panel("Cores in use on the machine", 'sum by (node, mode) (rate(tandem_node_cpu_seconds_total{mode!="idle"}[$range]))', ("node", "mode"), "cores"),
    Panel("Cores in use by process", "rate(tandem_process_cpu_seconds_total[$range])", ("process", "pid", "node"), "cores"),
    Panel("Memory of the machine in use", "tandem_node_memory_bytes - tandem_node_memory_available_bytes", ("node",), "bytes"),
    Panel("Memory by process", "tandem_process_resident_memory_bytes", ("process", "pid", "node"), "bytes"),
    Panel("Disks", "rate(tandem_node_disk_bytes_total[$range])", ("node", "direction"), "bytes per second"),
    Panel("Network", "rate(tandem_node_network_bytes_total[$range])", ("node", "direction"), "bytes per second"),
    Panel("Disk of the run that is free", "tandem_run_disk_free_bytes", ("run",), "bytes"),
    Panel("GPU in use", "tandem_gpu_utilization_ratio", ("node", "gpu"), "share", 1.0),
    Panel("Temperature of the GPU", "tandem_gpu_temperature_celsius", ("node", "gpu"), "°C"),
    Panel("Power of the GPU", "tandem_gpu_power_watts", ("node", "gpu"), "W"),
)


@lru_cache(maxsize=16)
def _answers(reader: MetricsReader) -> Answers:
    return Answers(reader.read)


def _reader(run: OpenRun) -> MetricsReader:
    return MetricsReader(run.directory / FILE)


def _name(legend: Sequence[str], labels: Labels) -> str:
    values = dict(labels)
    return " ".join(values[label].removeprefix("tandem.") for label in legend if values.get(label))


def _evaluated(run: OpenRun, panels: Sequence[Panel], moments: Sequence[int]) -> Iterator[tuple[Panel, dict[Labels, dict[int, float]]]]:
    """Yields the lines of each panel by their labels: values by milliseconds."""
    step_s, reader = (moments[-1] - moments[0]) / max(1, len(moments) - 1) / 1000, _reader(run)
    wide = f"{math.ceil(max(SAMPLES_OF_RATE * _interval_s(reader), 2 * step_s))}s"
    for panel in panels:
        lines = _answers(reader).over(panel.query.replace("$range", wide), moments)
        yield panel, {labels: dict(values) for labels, values in sorted(lines.items())}


def _interval_s(reader: MetricsReader) -> float:
    """Returns the usual seconds between two of the newest scrapes."""
    times = max((series.times for series in reader.read([Matcher(NAME, "=", "up")], 0, 2**62)), key=len, default=())[-20:]
    gaps = sorted(later - earlier for earlier, later in pairwise(times))
    return gaps[len(gaps) // 2] / 1000 if gaps else DEFAULT_INTERVAL_S


def _told_apart(panel: Panel, lines: Collection[Labels]) -> list[str]:
    """Returns the labels of the legend in which the lines differ; all of them for a single line."""
    values = {label: {dict(labels).get(label) for labels in lines} for label in panel.legend}
    return [label for label in panel.legend if len(values[label]) > 1] or list(panel.legend)


def _moments(first: int, last: int, count: int) -> list[int]:
    return sorted({first + round((last - first) * at / max(1, count - 1)) for at in range(count)})


def hardware(run: OpenRun) -> dict[str, Any]:
    """Returns the charts of the hardware with their lines; none where the run has no metrics database. ``began_s``: Unix time of the first sample. Raises
    ``RunError`` where the database is damaged."""
    span = _reader(run).span_ms()
    if span is None:
        return {"charts": [], "began_s": None}
    charts = []
    for number, (panel, lines) in enumerate(_evaluated(run, PANELS, _moments(*span, _PLACES))):
        if lines:
            legend = _told_apart(panel, lines)
            series = [{"key": f"{number}|{_name(panel.legend, labels)}", "name": _name(legend, labels)} for labels in lines]
            charts.append({"title": panel.title, "unit": panel.unit, "floor": 0, "ceiling": panel.ceiling, "series": series, "points": [], "lines": []})
    return {"charts": charts, "began_s": span[0] / 1000}


def hardware_curves(run: OpenRun, keys: Sequence[str], low: float | None, high: float | None, points: int) -> dict[str, Any]:
    """Returns the lines ``keys`` between two times (seconds since the first sample) in the form of the curves of a run. Raises ``RunError`` where the run has
    no metrics database."""
    span = _reader(run).span_ms()
    if span is None:
        raise RunError(f"'{run.name}' has no samples in {FILE}")
    first = span[0] if low is None else span[0] + round(low * 1000)
    last = span[1] if high is None else min(span[1], span[0] + round(high * 1000))
    moments = _moments(first, max(first, last), max(2, min(points, MOST_MOMENTS)))
    wanted = {int(number): None for key in keys if (number := key.partition("|")[0]).isdecimal() and int(number) < len(PANELS)}
    series: dict[str, Any] = {}
    for place, (panel, lines) in zip(wanted, _evaluated(run, [PANELS[each] for each in wanted], moments), strict=True):
        for labels, values in lines.items():
            if (key := f"{place}|{_name(panel.legend, labels)}") in keys:
                series[key] = {"y": [None if (value := values.get(when)) is None else finite(value) for when in moments]}
    x = [(when - span[0]) / 1000 for when in moments]
    return {"x": x, "rows_each": 1, "rows": len(x), "whole": [0, (span[1] - span[0]) / 1000], "series": series}


def newest_by_node(run: OpenRun) -> dict[str, tuple[float, tuple[str, ...]]]:
    """Returns of each node when it has looked at itself last, Unix seconds, and its GPUs, by the newest samples; none where the database is damaged."""
    with suppress(RunError):
        return _newest_by_node(run)
    return {}


def _newest_by_node(run: OpenRun) -> dict[str, tuple[float, tuple[str, ...]]]:
    reader = _reader(run)
    span = reader.span_ms()
    if span is None:
        return {}
    answers = _answers(reader)
    newest = lambda name: answers.over(f"last_over_time({name}[1h])", [span[1]]).items()
    gpus: dict[str, list[str]] = {}
    for labels, _ in newest("tandem_gpu_fault"):
        known = dict(labels)
        if known.get("gpu", "all") != "all":
            gpus.setdefault(known.get("node", ""), []).append(f"GPU {known['gpu']}")
    seen = {dict(labels).get("node", ""): values[0][1] for labels, values in newest("tandem_node_last_look_timestamp_seconds")}
    return {node: (at_s, tuple(sorted(gpus.get(node, ())))) for node, at_s in seen.items()}


def newest_processes(run: OpenRun) -> list[dict[str, Any]]:
    """Returns what each process of the run uses by the newest samples, the largest first: name, cores and bytes; none where the database is damaged."""
    with suppress(RunError):
        return _newest_processes(run)
    return []


def _newest_processes(run: OpenRun) -> list[dict[str, Any]]:
    reader = _reader(run)
    span = reader.span_ms()
    if span is None:
        return []
    answers = _answers(reader)
    memory = answers.over("tandem_process_resident_memory_bytes", [span[1]])
    cores = {_name(PANELS[1].legend, labels): values[0][1] for labels, values in answers.over("rate(tandem_process_cpu_seconds_total[1m])", [span[1]]).items()}
    rows = [{"name": name, "bytes": values[0][1], "cores": cores.get(name)} for labels, values in memory.items() if (name := _name(PANELS[3].legend, labels))]
    return sorted(rows, key=lambda each: -each["bytes"])
