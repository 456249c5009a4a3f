"""The traced steps of a run as timelines: one row per rank, one bar per span, and the measured pipeline bubble beside the predicted one."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

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

MOST_BARS = 3000
"""Bars of one traced step, so that a page stays below a megabyte."""


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
    if len(seconds) < 2 * shape.stages:
        # The step was cut off, or is not over.
        return None
    forward, backward = ([seconds[name, stage] for stage in range(shape.stages)] for name in ("forward", "backward"))
    simulated = bubble_share(simulate(shape, schedule(order, shape), forward, backward))
    return Bubble(shape, bubble_share(timeline), published_bubble_share(shape), simulated)


def _operation(span: Span) -> Operation:
    return Operation("forward" if span.name == "forward" else "backward", span.arguments["stage"], span.arguments["micro_batch"])


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A traced step: ``bars`` are the data of its chart, ``said`` is a sentence on its bubble, empty without a pipeline, and ``left_out`` the number of its
    shortest spans that have no bar."""

    step: int
    said: str
    bars: dict[str, Any]
    left_out: int


def traced_step(step: int, spans: Sequence[Span], order: ScheduleName, most_bars: int = MOST_BARS) -> TracedStep:
    """Returns the timeline of ``step``: one row for each rank, one bar for each span, at most ``most_bars``."""
    idle, said = bubble(spans, order), ""
    if idle is not None:
        shape = idle.shape
        said = (
            f"Bubble of {shape.ranks} ranks, {shape.micro_batches} micro-batches and {shape.virtual_stages} stages per rank, {order}: "
            f"measured {idle.measured:.1%}, predicted {idle.published:.1%} for equal stages and {idle.simulated:.1%} from the measured "
            "time of each stage, if every rank has a core of its own."
        )
    # Calls enclose the parts of the step, and collectives are inside them.
    spans = [span for span in spans if not span.category]
    longest = sorted(spans, key=lambda span: -span.seconds)[:most_bars]
    shown = sorted(longest, key=lambda span: span.start_s)
    began = min((span.start_s for span in spans), default=0.0)
    groups: dict[str, list[list[Any]]] = {}
    for span in shown:
        mark = span.arguments.get("micro_batch") if span.name in ("forward", "backward") else None
        detail = ", ".join(f"{key} {value}" for key, value in span.arguments.items())
        bar = [span.rank, round(span.start_s - began, 6), round(span.seconds, 6), 0 if mark is None else mark + 1, detail]
        groups.setdefault(span.name.replace("_", " "), []).append(bar)
    bars = {
        "kind": "gantt", "ranks": sorted({span.rank for span in spans}), "seconds": round(max((span.end_s for span in spans), default=began) - began, 6),
        "bars": [{"name": name, "items": items} for name, items in groups.items()],
    }  # fmt: skip
    return TracedStep(step, said, bars, len(spans) - len(shown))
