"""A plan as a page: one HTML file with its style and drawings, which needs no script and no other host. Imports no torch."""

import html
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from importlib.resources import files

from tandem.estimate.training.rank_memory import RankMemory, memory_by_stage
from tandem.layout.schedules import PipelineShape, schedule, simulate
from tandem.planner.as_text import plan_text, score_text
from tandem.planner.page_bars import STYLE, bar_rows, table
from tandem.planner.plan import Plan, named
from tandem.planner.pod_memory import PodMemoryPlan
from tandem.planner.pod_page import pod_sections
from tandem.planner.score import Score

GIB = 2**30
WIDTH = 960
MOST_BARS, MOST_PASSES, MOST_RANKS = 16, 16, 16
"""Stages, micro-batches and pipeline ranks that are drawn."""
KINDS = tuple(each.name for each in fields(RankMemory))


def plan_page(plan: Plan, beside: str = "", pod: PodMemoryPlan | None = None) -> str:
    """Returns the page of a plan. ``beside``: more text: what other GPUs would change, a step of reinforcement learning. ``pod``: its memory."""
    fastest = table(
        ("layout", "step, s", "MFU, %", "memory, GiB"),
        [
            (html.escape(named(each)), f"{each.step_seconds:.3g}", f"{each.mfu_percent:.1f}", f"{each.memory.total / GIB:.1f}")
            for each in plan.sweep.scored[:20]
        ],
    )
    sections = [*_sections(plan.chosen, pod), ("Front of time and memory", _front(plan.sweep.scored, plan.sweep.pareto) + fastest)]
    sections.append(_words(plan_text(plan) + beside))
    return _html(named(plan.chosen), f"{plan.advice.reason}. {plan.verdict}.", sections)


def score_page(score: Score, beside: str = "", pod: PodMemoryPlan | None = None) -> str:
    """Returns the page of one layout, with arguments as of ``plan_page``."""
    return _html(named(score), f"{score.step_seconds:.3g} s a step", [*_sections(score, pod), _words(score_text(score) + beside)])


def _sections(score: Score, pod: PodMemoryPlan | None) -> list[tuple[str, str]]:
    sections = [*(pod_sections(pod) if pod is not None else ()), ("Memory of a GPU in training, by pipeline stage", _memory(score))]
    sections.append(("Seconds of a step", bar_rows([("step", asdict(score.time))], "s", 1.0)))
    if score.layout.parallel.pipeline > 1:
        sections.append(("Pipeline", _timeline(score)))
    return sections


def _words(text: str) -> tuple[str, str]:
    return "As text", f"<pre tabindex='0'>{html.escape(text)}</pre>"


def _memory(score: Score) -> str:
    stages = memory_by_stage(score.shapes, score.layout)
    rows = [(f"stage {rank}", {kind: getattr(memory, kind) for kind in KINDS}) for rank, memory in enumerate(stages)]
    left_out = f"<p class='quiet'>{len(rows) - MOST_BARS} more stages are left out.</p>" if len(rows) > MOST_BARS else ""
    return bar_rows(rows[:MOST_BARS], "GiB", GIB, limit=score.hardware.memory_bytes) + left_out


def _timeline(score: Score) -> str:
    """Returns the forward and backward passes of the schedule that runs, with the first micro-batches if there are more than can be read."""
    parallel = score.layout.parallel
    passes = min(score.layout.micro_batches, max(MOST_PASSES, parallel.pipeline))
    if parallel.virtual_stages > 1:
        passes -= passes % parallel.pipeline
    shape = PipelineShape(parallel.pipeline, passes, parallel.virtual_stages)
    again = 1.0 if score.layout.recompute == "full" else 0.0
    computes = simulate(shape, schedule(parallel.schedule, shape), [1.0] * shape.stages, [2.0 + again] * shape.stages)
    span = max(compute.end for compute in computes)
    drawn = [f"<text x='0' y='{4 + rank * 20 + 14}'>rank {rank}</text>" for rank in range(min(shape.ranks, MOST_RANKS))]
    for compute in computes:
        if compute.rank >= MOST_RANKS:
            continue
        kind, stage, micro_batch, _ = compute.operation
        x, width = 60 + (WIDTH - 60) * compute.start / span, (WIDTH - 60) * (compute.end - compute.start) / span
        color = "var(--c0)" if kind == "forward" else "var(--c1)"
        opacity = 1 - 0.5 * (stage // shape.ranks) / max(1, shape.virtual_stages)
        drawn.append(
            f"<rect x='{x:.1f}' y='{4 + compute.rank * 20}' width='{max(width - 0.6, 0.4):.1f}' height='16' fill='{color}' opacity='{opacity:.2f}'>"
            f"<title>{kind} of micro-batch {micro_batch}, stage {stage}</title></rect>"
        )
    words = f"{passes} of {score.layout.micro_batches} micro-batches" if passes < score.layout.micro_batches else f"{passes} micro-batches"
    keys = f"<span><i style='background:var(--c0)'></i>forward</span> <span><i style='background:var(--c1)'></i>backward</span> <span>{words}</span>"
    drawing = _svg(8 + 20 * min(shape.ranks, MOST_RANKS), drawn, "passes of each pipeline rank over time")
    return f"<figure class='chart wide'><div class='legend'>{keys}</div>{drawing}</figure>"


def _front(scored: Sequence[Score], pareto: Sequence[Score]) -> str:
    """Returns a drawing of all layouts that fit: seconds to the right, memory upwards; those of the front are joined."""
    if not scored:
        return ""
    height, left, bottom = 320, 60, 36
    slowest = min(max(each.step_seconds for each in scored), 3 * scored[0].step_seconds)
    fastest, most = scored[0].step_seconds, scored[0].hardware.memory_bytes

    def place(each: Score) -> tuple[float, float]:
        right = (each.step_seconds - fastest) / ((slowest - fastest) or 1.0)
        return left + 8 + (WIDTH - left - 30) * right, (height - bottom) * (1 - each.memory.total / most)

    drawn = [_dot(place(each), each, "var(--quiet)", 2.5) for each in scored if each.step_seconds <= slowest]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(each) for each in pareto if each.step_seconds <= slowest))
    drawn.append(f"<polyline points='{path}' fill='none' stroke='var(--c1)'/>")
    drawn += [_dot(place(each), each, "var(--c1)", 4.5) for each in pareto if each.step_seconds <= slowest]
    drawn += [
        f"<line x1='{left}' x2='{WIDTH}' y1='{height - bottom}' y2='{height - bottom}' stroke='var(--line)'/>",
        f"<text x='{left}' y='{height - 16}'>{fastest:.3g} s</text><text x='{WIDTH}' y='{height - 16}' text-anchor='end'>{slowest:.3g} s a step</text>",
        f"<text x='0' y='12'>{most / GIB:.0f} GiB</text><text x='0' y='{height - bottom}'>0</text>",
    ]
    return f"<figure class='chart wide'>{_svg(height, drawn, 'layouts by seconds of a step and memory of a GPU')}</figure>"


def _dot(place: tuple[float, float], each: Score, color: str, radius: float) -> str:
    title = html.escape(f"{named(each)}: {each.step_seconds:.3g} s, {each.memory.total / GIB:.1f} GiB, MFU {each.mfu_percent:.1f} %")
    return f"<circle cx='{place[0]:.1f}' cy='{place[1]:.1f}' r='{radius}' fill='{color}'><title>{title}</title></circle>"


def _svg(height: float, drawn: Sequence[str], said: str) -> str:
    drawing = f"<svg viewBox='0 0 {WIDTH} {height:.0f}' width='100%' role='img' aria-label='{said}' font-size='14' fill='currentColor'>{''.join(drawn)}</svg>"
    return f"<div class='drawing' tabindex='0'>{drawing}</div>"


def _html(title: str, header: str, sections: Sequence[tuple[str, str]]) -> str:
    return "".join(_parts(title, header, sections))


def _parts(title: str, header: str, sections: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
    yield f"<meta name='color-scheme' content='light dark'><title>{html.escape(title)} · Tandem</title><style>"
    yield files("tandem.planner").joinpath("assets", "plan.css").read_text(encoding="utf-8")
    # Drawings are wider than a narrow screen, on which they scroll, so that their text can be read.
    yield STYLE + ".drawing{overflow-x:auto}.drawing svg{min-width:52rem;display:block}pre{overflow-x:auto;white-space:pre}</style></head><body><header><div>"
    yield f"<h1><small>plan</small>{html.escape(title)}</h1><p class='headline'>{html.escape(header)}</p></div></header><main>"
    for name, content in sections:
        yield f"<section><h2>{html.escape(name)}</h2>{content}</section>"
    yield "</main><footer>Predicted by Tandem; nothing was run.</footer></body></html>"
