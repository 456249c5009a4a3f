"""Writes ``report.html`` of a run: one file that needs no network.

It is built from the run's files alone (``metrics.jsonl``, the journal and traces), so that it can be written again at any time.
"""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plotly.graph_objects as graph
from plotly.offline import get_plotlyjs

from tandem.config.parallel import ScheduleName
from tandem.config.recipe import load_config
from tandem.report.timeline import timeline_section
from tandem.runtime.records.elastic import describe_fewer_ranks, fewer_ranks
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.metrics import read_rows
from tandem.runtime.records.tracing import Span, read_trace, traced_steps
from tandem.types import UserError

Row = Mapping[str, Any]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1b1f24; }
h1 { font-size: 1.6rem; margin-bottom: .2rem } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #d8dee4 }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums }
td, th { padding: .25rem .9rem .25rem 0; text-align: left; border-bottom: 1px solid #eaeef2; vertical-align: top }
th { font-weight: 600 } td.number { text-align: right } code, pre { font: 13px ui-monospace, monospace; background: #f6f8fa }
pre { padding: .7rem 1rem; overflow-x: auto } .good { color: #116329 } .bad { color: #a40e26 } .quiet { color: #59636e }
"""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The content of the page. ``examples_before`` and ``examples_after``: lists of {prompt, completion, correct}. ``traces``: the spans of all
    ranks by traced step; ``order``: the pipeline's schedule. ``note``: how the run differs from its recipe."""

    name: str
    rows: Sequence[Row]
    evaluations: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    predicted_memory: Mapping[str, float]
    examples_before: Sequence[Mapping[str, Any]]
    examples_after: Sequence[Mapping[str, Any]]
    commands: Sequence[str]
    headline: str
    traces: Mapping[int, Sequence[Span]] = field(default_factory=dict)
    order: ScheduleName = "1f1b"
    note: str = ""


def report_run(directory: Path) -> Path:
    """Writes ``report.html`` of the run in ``directory`` and returns its path. Raises ``UserError`` if ``directory`` is not a run."""
    if not (directory / "journal.sqlite").is_file():
        raise UserError(f"'{directory}' is not a run: it has no journal.sqlite; name a folder under runs/")
    path = directory / "report.html"
    write_report(read_facts(directory), path)
    return path


def read_facts(directory: Path) -> RunFacts:
    """Returns the content of the page from the files of the run in ``directory``."""
    with Journal(directory / "journal.sqlite", read_only=True) as journal:
        evaluations = [{"step": step, "kind": kind, **result} for step, kind, result in journal.evaluations()]
        recorded = journal.events()
        events = [{"kind": event.kind, "detail": event.detail} for event in recorded]
        traces = {step: read_trace(directory / "traces", step) for step in traced_steps(directory / "traces")}
        memory, commands = journal.get("memory", {}), journal.get("commands", [])
    sampled = [e for e in evaluations if e["kind"] == "sampled"]
    return RunFacts(
        name=directory.name,
        rows=read_rows(directory / "metrics.jsonl"),
        evaluations=evaluations,
        events=events,
        predicted_memory={"train": memory.get("trainer"), "rollout": memory.get("rollout"), "wait_rollout": memory.get("trainer_idle")} if memory else {},
        examples_before=sampled[0].get("examples", []) if sampled else [],
        examples_after=sampled[-1].get("examples", []) if sampled else [],
        commands=commands,
        headline=_headline(evaluations),
        traces=traces,
        order=load_config(directory / "config.yaml").parallel.schedule if traces else "1f1b",
        note=describe_fewer_ranks(fewer_ranks(recorded)),
    )


def _headline(evaluations: Sequence[Mapping[str, Any]]) -> str:
    held_out = [e for e in evaluations if e["kind"] == "held_out"]
    if held_out:
        first, last = held_out[0], held_out[-1]
        return f"held-out loss {first['loss']:.4f} before, {last['loss']:.4f} (perplexity {last['perplexity']:.2f}) after {last['step']} steps"
    by_kind = {kind: [e for e in evaluations if e["kind"] == kind] for kind in ("sampled", "greedy", "final", "final_greedy")}
    said = []
    if by_kind["sampled"]:
        said.append(f"held-out sampled accuracy {by_kind['sampled'][0]['accuracy']:.3f} before")
    for kind, words in (("final", "sampled"), ("final_greedy", "greedy")):
        if by_kind[kind]:
            last = by_kind[kind][-1]
            said.append(f"{last['accuracy']:.3f} {words} on {last['count']} fresh prompts after {last['step']} steps")
    return "; ".join(said) or "This run has not been evaluated yet."


def write_report(facts: RunFacts, path: Path) -> None:
    """Writes the page to ``path`` through a temporary file, so that a reader never sees an incomplete page."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(page(facts), encoding="utf-8")
    temporary.replace(path)


def page(facts: RunFacts) -> str:
    is_pretraining = any("train/loss" in row for row in facts.rows)
    curve = "<h2>Loss</h2>" + _loss_curve(facts) if is_pretraining else "<h2>Accuracy and reward</h2>" + _learning_curve(facts)
    sections = [
        f"<h1>{html.escape(facts.name)}</h1><p>{html.escape(facts.headline)}</p>",
        f"<p class='bad'>{html.escape(facts.note)}</p>" if facts.note else "",
        curve,
        "<h2>Time of each phase</h2>" + _time_plot(facts.rows) + _time_table(facts.rows),
        timeline_section(facts.traces, facts.order, _figure),
        "<h2>Memory of each phase</h2>" + _memory_table(facts),
        "" if is_pretraining else "<h2>Agreement of rollout and trainer</h2>" + _agreement(facts.rows),
        "" if is_pretraining else "<h2>Completions before and after</h2>" + _examples(facts),
        "<h2>Recoveries and faults</h2>" + _events(facts.events),
        "<h2>Try the model</h2><pre>" + html.escape("\n".join(facts.commands)) + "</pre>",
    ]
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(facts.name)} · Tandem</title>"
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>{''.join(sections)}</body></html>"
    )


def _figure(traces: Sequence[Any], **layout: Any) -> str:
    figure = graph.Figure(data=list(traces))
    figure.update_layout(template="plotly_white", height=340, margin={"l": 50, "r": 20, "t": 20, "b": 45}, **layout)
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False}))


def _column(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    points = [(int(row["step"]), float(row[key])) for row in rows if row.get(key) is not None]
    return [x for x, _ in points], [y for _, y in points]


def _learning_curve(facts: RunFacts) -> str:
    traces = []
    steps, values = _column(facts.rows, "reward/mean")
    if steps:
        traces.append(graph.Scatter(x=steps, y=values, name="reward in training", line={"color": "#9ec5fe"}))
    for kind, kinds, colour in (("sampled", {"sampled"}, "#0b5ed7"), ("greedy", {"greedy", "final_greedy"}, "#198754")):
        points = [(e["step"], e["accuracy"], e.get("standard_error", 0.0)) for e in facts.evaluations if e["kind"] in kinds]
        if points:
            traces.append(
                graph.Scatter(
                    x=[p[0] for p in points], y=[p[1] for p in points], name=f"held-out accuracy, {kind}", mode="lines+markers",
                    error_y={"type": "data", "array": [p[2] for p in points]}, line={"color": colour},
                )
            )
    if not traces:
        return "<p class='quiet'>No step was completed.</p>"
    return _figure(traces, xaxis_title="optimizer step", yaxis_range=[0, 1.05], legend={"orientation": "h", "y": 1.12})


def _loss_curve(facts: RunFacts) -> str:
    steps, values = _column(facts.rows, "train/loss")
    traces = [graph.Scatter(x=steps, y=values, name="training", line={"color": "#9ec5fe"})]
    held_out = [(e["step"], e["loss"]) for e in facts.evaluations if e["kind"] == "held_out"]
    if held_out:
        x, y = zip(*held_out, strict=True)
        traces.append(graph.Scatter(x=x, y=y, name="held out", mode="lines+markers", line={"color": "#0b5ed7"}))
    return _figure(traces, xaxis_title="optimizer step", yaxis_title="nats per token", legend={"orientation": "h", "y": 1.12})


def _timings(rows: Sequence[Row]) -> dict[str, list[float]]:
    names = sorted({key for row in rows for key in row if key.startswith("timing_s/") and key != "timing_s/step"})
    return {name.removeprefix("timing_s/"): [float(row.get(name, 0.0)) for row in rows] for name in names}


def _time_plot(rows: Sequence[Row]) -> str:
    steps = [int(row["step"]) for row in rows]
    traces = [graph.Bar(x=steps, y=values, name=name) for name, values in _timings(rows).items() if any(values)]
    if not traces:
        return "<p class='quiet'>No step was completed.</p>"
    return _figure(traces, barmode="stack", xaxis_title="optimizer step", yaxis_title="seconds")


def _time_table(rows: Sequence[Row]) -> str:
    body = []
    for name, values in sorted(_timings(rows).items(), key=lambda item: -sum(item[1])):
        ordered = sorted(values)
        cells = (sum(values), ordered[len(ordered) // 2], ordered[-1])
        body.append(f"<tr><td>{html.escape(name)}</td>" + "".join(f"<td class='number'>{v:.3f}</td>" for v in cells) + "</tr>")
    return f"<table><tr><th>phase</th><th>total s</th><th>median s</th><th>max s</th></tr>{''.join(body)}</table>"


def _memory_table(facts: RunFacts) -> str:
    measured: dict[str, float] = {}
    for row in facts.rows:
        for key, value in row.items():
            if key.startswith("memory/") and key.endswith("/measured"):
                phase = key.split("/")[1]
                measured[phase] = max(measured.get(phase, 0.0), float(value))
    body = []
    for phase in sorted(set(measured) | set(facts.predicted_memory)):
        predicted, peak = facts.predicted_memory.get(phase), measured.get(phase)
        ratio = f"{peak / predicted:.2f}" if predicted and peak else "-"
        cells = "".join(f"<td class='number'>{_mebibytes(v)}</td>" for v in (predicted, peak))
        body.append(f"<tr><td>{html.escape(phase)}</td>{cells}<td class='number'>{ratio}</td></tr>")
    return (
        "<table><tr><th>phase</th><th>predicted MiB</th><th>measured MiB (max)</th><th>measured / predicted</th></tr>"
        f"{''.join(body)}</table>"
    )


def _mebibytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.0f}"


def _agreement(rows: Sequence[Row]) -> str:
    _, values = _column(rows, "mismatch_kl")
    if not values:
        return "<p class='quiet'>No step was completed.</p>"
    worst = max(abs(value) for value in values)
    if worst == 0.0:
        return f"<p class='good'>mismatch_kl is exactly 0 in all {len(values)} steps.</p>"
    steps, values = _column(rows, "mismatch_kl")
    note = f"<p class='bad'>mismatch_kl is not 0: at most {worst:.3g}.</p>"
    return note + _figure([graph.Scatter(x=steps, y=values, name="mismatch_kl")], xaxis_title="optimizer step")


def _examples(facts: RunFacts) -> str:
    after = {example["prompt"]: example for example in facts.examples_after}
    body = []
    for before in facts.examples_before:
        later = after.get(before["prompt"])
        cells = "".join(_completion(example) for example in (before, later))
        body.append(f"<tr><td><code>{html.escape(before['prompt'])}</code></td>{cells}</tr>")
    if not body:
        return "<p class='quiet'>No completions were saved.</p>"
    return f"<table><tr><th>prompt</th><th>before</th><th>after</th></tr>{''.join(body)}</table>"


def _completion(example: Mapping[str, Any] | None) -> str:
    if example is None:
        return "<td class='quiet'>-</td>"
    colour = "good" if example.get("correct") else "bad"
    return f"<td class='{colour}'><code>{html.escape(example['completion'])}</code></td>"


def _events(events: Sequence[Mapping[str, Any]]) -> str:
    if not events:
        return "<p>None.</p>"
    body = "".join(
        f"<tr><td>{html.escape(str(e['kind']))}</td><td><code>{html.escape(json.dumps(e['detail'], default=str))}</code></td></tr>"
        for e in events
    )
    return f"<table><tr><th>event</th><th>detail</th></tr>{body}</table>"
