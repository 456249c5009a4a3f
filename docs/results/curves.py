"""Draws the curves of runs as an SVG: the figures of these pages.

    python docs/results/curves.py docs/results/ppo.svg 'seed 0=runs/seed-0' 'seed 1=runs/seed-1' --target 0.85
    python docs/results/curves.py docs/results/dpo.svg 'seed 0=runs/seed-0' --evaluation held_out_pairs --key loss --axis 'held-out loss'
    python docs/results/curves.py docs/results/reward_model.svg 'seed 0=runs/seed-0' --metric rewards/accuracies --mean 10

By default the points are the evaluations of kind `sampled` in each run's journal; with --metric they are rows of its `metrics.jsonl`.
"""

import argparse
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from tandem.runtime.records.journal import Journal
from tandem.runtime.records.metrics import read_rows

WIDTH, PLOT_HEIGHT = 760, 240
LEFT, RIGHT, BOTTOM = 64, 16, 48
LEGEND_COLUMNS, LEGEND_ROW = 3, 20
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # Okabe and Ito: told apart by readers who are colour-blind
GREY = "#808080"  # legible on the light and the dark theme
MOST_INTERVALS = 6

Points = list[tuple[float, float]]


class Line(NamedTuple):
    label: str
    points: Points


def evaluated(run: Path, kind: str, key: str) -> Points:
    """Returns ``(step, value)`` of ``key`` in each evaluation of ``kind``."""
    with Journal(run / "journal.sqlite", read_only=True) as journal:
        return [(step, result[key]) for step, each, result in journal.evaluations() if each == kind]


def measured(run: Path, key: str, mean: int) -> Points:
    """Returns ``(last step, mean of key)`` of each ``mean`` rows after one another."""
    rows = read_rows(run / "metrics.jsonl")
    groups = [rows[start : start + mean] for start in range(0, len(rows) - mean + 1, mean)]
    return [(group[-1]["step"], sum(row[key] for row in group) / mean) for group in groups]


def ticks(high: float) -> list[float]:
    """Returns the multiples of 1, 2 or 5 times a power of ten from 0 up to the first that is not below ``high``, in at most ``MOST_INTERVALS`` intervals."""
    power = 10.0 ** (math.floor(math.log10(high)) - 1)
    intervals = [digit * power for digit in (1, 2, 5, 10, 20, 50)]
    interval = next(each for each in intervals if each * MOST_INTERVALS >= high * (1 - 1e-9))
    return [round(i * interval, 10) for i in range(math.ceil(high / interval - 1e-9) + 1)]


def svg(lines: Sequence[Line], axis: str, target: float | None) -> str:
    """Returns the drawing. ``axis``: what the values are. ``target``: the value of a dashed line across."""
    points = [point for line in lines for point in line.points]
    across = ticks(max(step for step, _ in points))
    up = ticks(max(*(value for _, value in points), target or 0))

    top = 20 + LEGEND_ROW * math.ceil(len(lines) / LEGEND_COLUMNS)
    bottom = top + PLOT_HEIGHT
    height, plot_width = bottom + BOTTOM, WIDTH - LEFT - RIGHT

    def place(step: float, value: float) -> tuple[float, float]:
        return round(LEFT + plot_width * step / across[-1], 1), round(bottom - PLOT_HEIGHT * value / up[-1], 1)

    drawn = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13" fill="{GREY}">']
    for value in up:
        x, y = place(0, value)
        drawn.append(f'<path d="M{x} {y}H{WIDTH - RIGHT}" stroke="{GREY}" stroke-opacity="0.25"/>')
        drawn.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    for step in across:
        x, y = place(step, 0)
        drawn.append(f'<text x="{x}" y="{y + 18}" text-anchor="middle">{step:g}</text>')
    middle = top + PLOT_HEIGHT / 2
    drawn.append(f'<text x="{LEFT + plot_width / 2}" y="{height - 10}" text-anchor="middle">step</text>')
    drawn.append(f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{escape(axis)}</text>')
    if target is not None:
        x, y = place(0, target)
        drawn.append(f'<path d="M{x} {y}H{WIDTH - RIGHT}" stroke="{GREY}" stroke-dasharray="5 4"/>')
    for i, line in enumerate(lines):
        colour = COLOURS[i % len(COLOURS)]
        x, y = LEFT + i % LEGEND_COLUMNS * plot_width // LEGEND_COLUMNS, 20 + i // LEGEND_COLUMNS * LEGEND_ROW
        places = " ".join("{},{}".format(*place(*point)) for point in line.points)
        drawn.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"><title>{escape(line.label)}</title></polyline>')
        drawn.append(f'<path d="M{x} {y}h22" stroke="{colour}" stroke-width="3"/><text x="{x + 28}" y="{y + 4}">{escape(line.label)}</text>')
    return "\n".join([*drawn, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="the SVG that is written")
    parser.add_argument("runs", nargs="+", metavar="LABEL=RUN_DIR")
    parser.add_argument("--evaluation", default="sampled", help="kind of the evaluations (default: sampled)")
    parser.add_argument("--key", default="accuracy", help="key of an evaluation's result (default: accuracy)")
    parser.add_argument("--metric", help="key of metrics.jsonl, in place of evaluations")
    parser.add_argument("--mean", type=int, default=1, help="rows that a point of --metric is the mean of (default: 1)")
    parser.add_argument("--axis", default="held-out accuracy, sampled", help="what the values are")
    parser.add_argument("--target", type=float, help="value of a dashed line")
    options = parser.parse_args()
    lines = []
    for text in options.runs:
        label, _, run = text.partition("=")
        points = measured(Path(run), options.metric, options.mean) if options.metric else evaluated(Path(run), options.evaluation, options.key)
        lines.append(Line(label, points))
    options.path.write_text(svg(lines, options.axis, options.target), encoding="utf-8")


if __name__ == "__main__":
    main()
