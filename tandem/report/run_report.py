"""Writes ``report.html`` of a run, or one page that compares several runs: a file that needs no network.

It is built from the run's files alone (``metrics.jsonl``, the journal, the recipe and traces), so that it can be written again at any time.
"""

from pathlib import Path

from tandem.report.cards import Card, cards, status, totals_of_rows
from tandem.report.charts import sections, stage_charts, time_chart
from tandem.report.page import Page, new_page, write_page
from tandem.report.run_facts import RunFacts, read_facts
from tandem.report.series import Chart, Series, column
from tandem.report.tables import (
    agreement,
    alerts,
    configuration,
    escaped,
    events_table,
    examples,
    marks,
    memory_table,
    moves_table,
    phases_table,
    samples,
    time_table,
)
from tandem.report.timeline import traced_step

REPORT = "report.html"
"""The page's name in the folder of its run."""


def report_run(directory: Path, path: Path | None = None) -> Path:
    """Writes the page of the run in ``directory`` to ``path`` (``None``: ``report.html`` in it) and returns its path. Raises ``UserError`` if
    ``directory`` is not a run."""
    path = path or directory / REPORT
    write_page(run_page(read_facts(directory)), path)
    return path


def run_page(run: RunFacts) -> str:
    """Returns the page of one run."""
    found, stage, phases = sections([run]), stage_charts(run), time_chart(run)
    page = new_page(run.name, [*(chart for charts in found.values() for chart in charts), *stage, phases])
    page.marks = marks(run)
    others = found.pop("Other metrics", [])
    speed = found.pop("Speed", [])
    for title, charts in found.items():
        page.add(title, page.grid(charts))
    if not run.is_data:
        page.add("Samples by step", samples(run.samples))
        page.add("Completions before and after", examples(run))
    if not (found or run.rows):
        page.add("Curves", "<p class='quiet'>No step was completed.</p>")
    page.add("Speed", page.grid(speed))
    page.add("Time of each phase", page.chart(phases, size=" wide") if phases.series else "", time_table(run.rows))
    page.add("Predicted and measured", phases_table(run))
    for step, spans in sorted(run.traces.items()):
        traced = traced_step(step, spans, run.order)
        left_out = f"<p class='quiet'>{traced.left_out:,} of the shortest spans are left out.</p>" if traced.left_out else ""
        page.add(f"Step {step}, traced", traced.said, page.figure(traced.bars, "Ranks", "seconds since the step began", " wide"), left_out)
    page.add("Memory of each phase", memory_table(run), moves_table(run.rows))
    if not run.is_data:
        page.add("Agreement of rollout and trainer", agreement(run.rows), _mismatch(page, run))
    page.add("Supervised fine-tuning before reinforcement learning", page.grid(stage, own_steps=True))
    page.add("Other metrics", page.grid(others))
    page.add("Recoveries and faults", events_table(run.events))
    page.add("Configuration", configuration(run))
    page.add("Try the model", "<div class='panel'><pre>" + escaped("\n".join(run.commands)) + "</pre></div>" if run.commands else "")
    header = f"<p class='headline'>{escaped(run.headline)} {_status(run)}</p>{alerts(run)}{_cards(run)}"
    return page.html("run", header, [(run.name, run.rows)])


def _mismatch(page: Page, run: RunFacts) -> str:
    values = column(run.rows, "mismatch_kl")
    if not any(values):
        return ""
    return page.grid([Chart("Difference of rollout and trainer", [Series("mismatch_kl", values)], "nats")])


def _status(run: RunFacts) -> str:
    words, kind = status(run)
    return f"<span class='badge {kind}'>{words}</span>"


def _cards(run: RunFacts) -> str:
    """Returns the figures at the top of the page."""
    shown = "".join(f"<div><b>{_figure(card)}</b><span>{escaped(card.name)}</span></div>" for card in cards(run, totals_of_rows(run.rows)))
    return f"<div class='cards'>{shown}</div>"


def _figure(card: Card) -> str:
    value = f"<i class='{card.state}'>{card.value}</i>" if card.state else card.value
    return (f"<s>{card.before} →</s> " if card.before else "") + value + (f" <s>of {card.limit}</s>" if card.limit else "")
