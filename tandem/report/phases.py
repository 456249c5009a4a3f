"""Predicted beside measured seconds and bytes of every phase of a run's step: of the summary at its end, its journal and its report."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tandem.report.cards import MEASURED, MEMORY, memory_of_phases
from tandem.report.series import Row

STATES = {
    "train": ("train",), "rollout": ("rollout",), "inference": ("inference",),
    "switch": ("offload", "onload", "keep_engine", "sleep_engine", "terminate_engine"),
    "weight update": ("convert", "register", "update_weight"),
}  # fmt: skip
"""The states of the pod, or phases of a run on data, whose seconds belong to a phase."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """Of one step, the median of all but the first: seconds; and the most bytes. ``None``: not known."""

    phase: str
    predicted_s: float | None
    measured_s: float | None
    predicted_bytes: float | None
    measured_bytes: float | None


def phase_figures(rows: Sequence[Row], predicted_memory: Mapping[str, float], prediction: Mapping[str, Any]) -> list[PhaseFigures]:
    """Returns the phases that the run had. ``prediction``: what ``PREDICTION_KEY`` holds."""
    seconds = seconds_at(prediction, mean_length(rows))
    largest: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith(MEMORY) and key.endswith(MEASURED):
                largest[key] = max(largest.get(key, 0.0), float(value))
    memory = {each.phase: each for each in memory_of_phases(largest.items(), predicted_memory)}
    figures_of_run = []
    # The first step starts threads and fills caches.
    after_first = rows[1:] or rows
    for phase, states in STATES.items():
        keys = [f"timing_s/{state}" for state in states]
        of_steps = [sum(float(row.get(key, 0.0)) for key in keys) for row in after_first if any(key in row for key in keys)]
        took = statistics.median(of_steps) if of_steps else None
        of_memory = memory.get(phase)
        if took is not None or of_memory is not None:
            bytes_of = (None, None) if of_memory is None else (of_memory.predicted, of_memory.measured)
            figures_of_run.append(PhaseFigures(phase, seconds.get(phase), took, *bytes_of))
    return figures_of_run


def seconds_at(prediction: Mapping[str, Any], length: float) -> dict[str, float]:
    """Returns the seconds by phase for completions of ``length`` tokens, on the line between the two lengths of the ``prediction``."""
    made = prediction.get("at", [])
    if not made:
        return {}
    (first, of_first), (last, of_last) = made[0], made[-1]
    share = 0.0 if last == first else (length - first) / (last - first)
    return {phase: of_first[phase] + share * (of_last[phase] - of_first[phase]) for phase in of_first}


def mean_length(rows: Sequence[Row]) -> float:
    """Returns the mean length of a run's completions; 0 of a run without any."""
    lengths = [float(row["response_length/mean"]) for row in rows[1:] or rows if "response_length/mean" in row]
    return sum(lengths) / len(lengths) if lengths else 0.0


def phase_cells(figures: Sequence[PhaseFigures]) -> list[tuple[str, ...]]:
    """Returns the rows of a table, its header first; empty without a prediction."""
    if not any(each.predicted_s is not None or each.predicted_bytes is not None for each in figures):
        return []
    head = ("phase of a step", "predicted s", "measured s", "ratio", "predicted MiB", "measured MiB", "ratio")
    rows = [(each.phase, *_cells(each.predicted_s, each.measured_s, 1), *_cells(each.predicted_bytes, each.measured_bytes, MIB)) for each in figures]
    return [head, *rows]


def phase_lines(figures: Sequence[PhaseFigures]) -> list[str]:
    """Returns the same for a terminal."""
    cells = phase_cells(figures)
    if not cells:
        return []
    widths = [max(len(row[place]) for row in cells) for place in range(len(cells[0]))]
    return ["  " + "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]) for row in cells]


def to_json(figures: Sequence[PhaseFigures]) -> list[dict[str, Any]]:
    return [asdict(each) for each in figures]


def _cells(predicted: float | None, measured: float | None, unit: float) -> tuple[str, str, str]:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value / unit:,.0f}" if unit > 1 else f"{value:.3g}"

    return shown(predicted), shown(measured), f"{measured / predicted:.2f}" if predicted and measured else "-"
