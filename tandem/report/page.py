"""Puts the page together: one HTML file with its style, its script and its data, which needs no network."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from tandem.report.series import Chart, Row, chart_json, points_each, run_json
from tandem.report.tables import escaped


@dataclass(slots=True)
class Page:
    """A page under construction. ``charts``: the data of its charts, in their order; ``marks``: (step, event) that every curve shows at its axis;
    ``sections``: (title, HTML)."""

    title: str
    points: int
    charts: list[dict[str, Any]] = field(default_factory=list)
    marks: Sequence[tuple[int, str]] = ()
    sections: list[tuple[str, str]] = field(default_factory=list)

    def add(self, title: str, *parts: str) -> None:
        """Adds a section, unless it is empty."""
        if any(parts):
            self.sections.append((title, "".join(parts)))

    def grid(self, charts: Sequence[Chart], *, own_steps: bool = False) -> str:
        """Returns the HTML of ``charts``, side by side. ``own_steps``: their steps are not those of the run."""
        alone = len(charts) == 1
        shown = "".join(
            self.chart(chart, own_steps=own_steps, size=" wide" if alone else " double" if len(chart.series) > 2 else "") for chart in charts
        )
        return f"<div class='grid'>{shown}</div>" if charts else ""

    def chart(self, chart: Chart, *, own_steps: bool = False, size: Literal["", " double", " wide"] = "") -> str:
        """Returns the HTML of ``chart``. ``size``: one column, two, or all."""
        shown = chart_json(chart, self.points)
        return self.figure({**shown, "own": True} if own_steps else shown, chart.title, chart.unit, size)

    def figure(self, data: Mapping[str, Any], title: str, unit: str = "", size: str = "") -> str:
        """Returns the HTML of a chart whose ``data`` the script draws."""
        self.charts.append(dict(data))
        caption = f"{escaped(title)}<span>{escaped(unit)}</span>" if unit else escaped(title)
        return (
            f"<figure class='chart{size}' data-chart='{len(self.charts) - 1}'><figcaption>{caption}</figcaption><div class='keys'></div>"
            "<div class='plot'></div></figure>"
        )

    def html(self, kind: str, header: str, runs: Sequence[tuple[str, Sequence[Row]]]) -> str:
        """Returns the page. ``kind``: a word above its title; ``header``: HTML below it; ``runs``: the name and the rows of each run."""
        data = {"runs": [run_json(name, rows, self.points) for name, rows in runs], "charts": self.charts, "marks": self.marks}
        # No end of a script can be inside.
        text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        links = "".join(f"<a href='#s{number}'>{escaped(title)}</a>" for number, (title, _) in enumerate(self.sections))
        body = "".join(f"<section id='s{number}'><h2>{escaped(title)}</h2>{content}</section>" for number, (title, content) in enumerate(self.sections))
        return (
            "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
            f"<meta name='color-scheme' content='light dark'><title>{escaped(self.title)} · Tandem</title><style>{asset('report.css')}</style></head>"
            f"<body><header><div><h1><small>{escaped(kind)}</small>{escaped(self.title)}</h1>{header}</div></header>"
            f"<nav><div><div class='links'>{links}</div><div class='tools'><label>x axis <select id='axis'><option value='step'>steps</option>"
            "<option value='time'>time</option></select></label><label><input id='outliers' type='checkbox'>ignore outliers</label><label>smoothing "
            "<input id='smooth' type='range' min='0' max='0.98' step='0.01' value='0'></label>"
            "<button id='reset' type='button' hidden>all steps</button></div></div></nav>"
            "<noscript><main><p class='alert'>The curves need JavaScript; the tables do not.</p></main></noscript>"
            f"<main>{body}</main><footer>Written by Tandem from the run's own files. Drag across a curve to enlarge it, double-click to go back.</footer>"
            f"<script type='application/json' id='data'>{text}</script><script>{asset('report.js')}</script></body></html>"
        )


def new_page(title: str, charts: Sequence[Chart]) -> Page:
    """Returns an empty page that will have about ``charts``, whose number limits the points of each."""
    return Page(title, points_each(charts))


def asset(name: str) -> str:
    return files("tandem.report").joinpath("assets", name).read_text(encoding="utf-8")


def write_page(text: str, path: Path) -> None:
    """Writes the page to ``path`` through a temporary file, so that a reader never sees an incomplete page."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
