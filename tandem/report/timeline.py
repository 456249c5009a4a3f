"""Draws the traced steps of a run: one row per rank, one bar per span, and the measured pipeline bubble beside the predicted one."""

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

import plotly.graph_objects as graph

from tandem.layout.schedules import (
    Compute,
    Operation,
    PipelineShape,
    ScheduleName,
    bubble_share,
    published_bubble_share,
    schedule,
    simulate,
)
from tandem.runtime.records.tracing import Span

_COLOURS = {
    "forward": "#6ea8fe", "backward": "#479f76", "receive_activation": "#dee2e6", "receive_gradient": "#dee2e6", "send_activation": "#ffda6a",
    "send_gradient": "#ffda6a", "reference": "#9ec5fe", "load the batch": "#f0b6d5", "shard the batch": "#e685b5", "reduce": "#fd9843",
    "clip": "#a370f7", "optimizer": "#6f42c1", "checkpoint": "#8c6d46", "checkpoint write": "#c9b08f",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bubble:
    """Shares of the ranks' time without a forward or backward pass, in one pipeline: ``measured``; ``published``, the closed form for
    stages of equal cost; ``simulated``, the schedule with each stage's measured mean seconds, if every rank has a core and
    transfers take no time."""

    shape: PipelineShape
    measured: float
    published: float
    simulated: float


def bubble(spans: Sequence[Span], order: ScheduleName) -> Bubble | None:
    """Returns the bubble of the first pipeline in a traced step; ``None`` if the step has no pipeline."""
    passes = [span for span in spans if span.name in ("forward", "backward")]
    first = min((span.arguments.get("pipeline", 0) for span in passes), default=0)
    passes = [span for span in passes if span.arguments.get("pipeline", 0) == first]
    stages = {span.arguments["stage"] for span in passes if "stage" in span.arguments}
    ranks = sorted({span.rank for span in passes})
    if not stages or len(ranks) < 2 or len(stages) % len(ranks):
        return None
    shape = PipelineShape(len(ranks), 1 + max(span.arguments["micro_batch"] for span in passes), len(stages) // len(ranks))
    timeline = [Compute(ranks.index(span.rank), _operation(span), span.start_s, span.end_s) for span in passes]
    seconds: dict[tuple[str, int], float] = {}
    of = lambda span: (span.name, span.arguments["stage"])
    for key, group in groupby(sorted(passes, key=of), key=of):
        seconds[key] = fmean(span.seconds for span in group)
    forward, backward = ([seconds[name, stage] for stage in range(shape.stages)] for name in ("forward", "backward"))
    simulated = bubble_share(simulate(shape, schedule(order, shape), forward, backward))
    return Bubble(shape, bubble_share(timeline), published_bubble_share(shape), simulated)


def _operation(span: Span) -> Operation:
    return Operation("forward" if span.name == "forward" else "backward", span.arguments["stage"], span.arguments["micro_batch"])


def timeline_section(traces: Mapping[int, Sequence[Span]], order: ScheduleName, figure: Callable[..., str]) -> str:
    """Returns the traced steps as HTML, empty without one. ``figure``: converts plotly traces and a layout to HTML."""
    return "".join(_step(step, spans, order, figure) for step, spans in sorted(traces.items()))


def _step(step: int, spans: Sequence[Span], order: ScheduleName, figure: Callable[..., str]) -> str:
    idle, said = bubble(spans, order), ""
    if idle is not None:
        shape = idle.shape
        said = (
            f"<p>Bubble of {shape.ranks} ranks, {shape.micro_batches} micro-batches and {shape.virtual_stages} stages per rank, {html.escape(order)}: "
            f"measured {idle.measured:.1%}, predicted {idle.published:.1%} for equal stages and {idle.simulated:.1%} from the measured "
            "time of each stage, if every rank has a core of its own.</p>"
        )
    # Calls enclose the parts of the step, and collectives are inside them.
    spans = [span for span in spans if not span.category]
    began = min((span.start_s for span in spans), default=0.0)
    ranks = sorted({span.rank for span in spans})
    bars = [_bar(name, [span for span in spans if span.name == name], began) for name in dict.fromkeys(span.name for span in spans)]
    layout: dict[str, Any] = {
        "barmode": "overlay", "xaxis_title": "seconds since the step began", "legend": {"orientation": "h", "y": 1.12},
        "yaxis": {"autorange": "reversed", "tickvals": ranks, "ticktext": [f"rank {rank}" for rank in ranks]},
    }  # fmt: skip
    return f"<h2>Step {step}, traced</h2>{said}" + figure(bars, **layout)


def _bar(name: str, spans: Sequence[Span], began: float) -> Any:
    numbers = [span.arguments.get("micro_batch") for span in spans]
    return graph.Bar(
        orientation="h", name=name.replace("_", " "), y=[span.rank for span in spans], x=[span.seconds for span in spans],
        base=[span.start_s - began for span in spans], marker={"color": _COLOURS.get(name, "#adb5bd"), "line": {"width": 0.5, "color": "white"}},
        text=["" if number is None or name not in ("forward", "backward") else str(number + 1) for number in numbers], textposition="inside",
        hovertext=[", ".join(f"{key} {value}" for key, value in span.arguments.items()) for span in spans],
    )  # fmt: skip
