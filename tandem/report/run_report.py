"""Writes ``report.html`` of a run, or one page that compares several runs: a file that needs no network.

It is built from the run's files alone (``metrics.jsonl``, the journal, the recipe and traces), so that it can be written again at any time.
"""

from pathlib import Path

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
    median,
    memory_table,
    moves_table,
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
    if run.ended is None:
        return "<span class='badge quiet'>not finished</span>"
    if run.reached is None:
        return "<span class='badge good'>finished</span>"
    return "<span class='badge good'>target reached</span>" if run.reached else "<span class='badge quiet'>finished, target not reached</span>"


def _cards(run: RunFacts) -> str:
    """Returns the figures at the top of the page."""
    cards: list[tuple[str, str]] = []
    for name, kinds, after_kind in (("held-out accuracy, sampled", ("sampled",), "final"), ("held-out accuracy, greedy", ("greedy",), "final_greedy")):
        before = [e["accuracy"] for e in run.evaluations if e["kind"] in kinds]
        after = [e["accuracy"] for e in run.evaluations if e["kind"] == after_kind] or before[1:]
        if before:
            cards.append((_change(before[0], after[-1] if after else None, ".3f"), name))
    losses = [e["loss"] for e in run.evaluations if e["kind"] == "held_out"]
    pairs = [e for e in run.evaluations if e["kind"] == "held_out_pairs"]
    if pairs:
        cards.append((_change(pairs[0]["accuracy"], pairs[-1]["accuracy"] if len(pairs) > 1 else None, ".3f"), "held-out pairs preferred rightly"))
    if losses:
        cards.append((_change(losses[0], losses[-1] if len(losses) > 1 else None, ".4f"), "held-out loss, nats per token"))
    asked = None if run.recipe is None else run.recipe.get("run.max_steps")
    done = run.rows[-1]["step"] + 1 if run.rows else 0
    cards.append((f"{done:,}" + (f" <s>of {asked:,}</s>" if asked else ""), "optimizer steps"))
    seconds = sum(value for value in column(run.rows, "timing_s/step") if value is not None)
    cards.append((_duration(seconds), "time of these steps"))
    speed = median(column(run.rows, "perf/tokens_per_s"))
    if speed is not None:
        cards.append((f"{speed:,.0f}", "tokens per second (median)"))
    mismatch = [abs(value) for value in column(run.rows, "mismatch_kl") if value is not None]
    if mismatch:
        cards.append(("<i class='good'>exactly 0</i>" if max(mismatch) == 0 else f"<i class='bad'>{max(mismatch):.2g}</i>", "mismatch_kl, largest"))
    return "<div class='cards'>" + "".join(f"<div><b>{value}</b><span>{escaped(name)}</span></div>" for value, name in cards) + "</div>"


def _change(before: float, after: float | None, form: str) -> str:
    return f"{before:{form}}" if after is None else f"<s>{before:{form}} →</s> {after:{form}}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
