"""Plans and scores as text for people. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from tandem.layout.shapes import parameter_count
from tandem.planner.plan import Plan, named
from tandem.planner.score import Score
from tandem.planner.warnings import warnings_of

GIB = 2**30
SHOWN = 5
"""Layouts of a sweep that the table has."""


def score_text(score: Score) -> str:
    return "\n".join(_score_lines(score))


def plan_text(plan: Plan) -> str:
    return "\n".join(_plan_lines(plan))


def _score_lines(score: Score) -> Iterator[str]:
    yield f"{parameter_count(score.shapes) / 1e9:.2f}B parameters on {score.layout.gpus} x {score.hardware.name}: {named(score)}"
    yield ""
    cost, memory = score.dollars_per_billion_tokens, f"{score.memory.total / GIB:.1f} of {score.hardware.memory_bytes / GIB:.1f} GiB"
    yield from table(
        ("step", "tokens/s/GPU", "TFLOP/s/GPU", "MFU", "bubble", "memory", "$/10^9 tokens"),
        [(
            f"{score.step_seconds:.3g} s", f"{score.tokens_per_s_per_gpu:,.0f}", f"{score.model_tflops_per_gpu:.0f}", f"{score.mfu_percent:.1f} %",
            f"{100 * score.bubble_fraction:.1f} %", memory, f"{cost:,.0f}" if cost else "unknown",
        )],
    )  # fmt: skip
    yield ""
    yield "memory of the fullest GPU, GiB: " + _shares(asdict(score.memory), GIB)
    yield "seconds of a step: " + _shares(asdict(score.time), 1.0)
    for warning in warnings_of(score):
        yield f"warning: {warning}"


def _shares(kinds: dict[str, float], unit: float) -> str:
    largest = sorted(kinds.items(), key=lambda each: -each[1])
    return ", ".join(f"{name.replace('_', ' ')} {value / unit:.3g}" for name, value in largest if value)


def _plan_lines(plan: Plan) -> Iterator[str]:
    yield f"rule: {plan.advice.reason}"
    yield f"  {named(plan.rule)}: {plan.rule.step_seconds:.3g} s a step, {plan.rule.memory.total / GIB:.1f} GiB"
    yield f"answer: {plan.verdict}"
    yield ""
    yield from _score_lines(plan.chosen)
    yield ""
    yield f"fastest of {plan.sweep.considered:,} layouts, and the front of time and memory (*):"
    on_front = {each.layout for each in plan.sweep.pareto}
    shown = {each.layout: each for each in (*plan.sweep.scored[:SHOWN], *plan.sweep.pareto[:SHOWN])}
    yield from table(
        ("", "layout", "step", "MFU", "memory"),
        [
            (
                "*" if each.layout in on_front else "", named(each), f"{each.step_seconds:.3g} s", f"{each.mfu_percent:.1f} %",
                f"{each.memory.total / GIB:.1f} GiB",
            )
            for each in sorted(shown.values(), key=lambda each: each.step_seconds)
        ],
    )  # fmt: skip
    yield ""
    fastest = "none fits, so that the model itself must be divided" if plan.memory.fastest is None else f"{plan.memory.fastest.name} is the fastest that fits"
    yield f"memory: {plan.memory.reason}: {plan.memory.strategy}; of data parallelism alone, {fastest}"
    yield from table(
        ("strategy", "memory", "saved", "computed again", "sent in a step", "step"),
        [
            (
                each.name, f"{each.memory_bytes / GIB:.1f} GiB", f"{100 * each.saved:.0f} %", f"{100 * each.compute_overhead:.0f} %",
                f"{each.communication_bytes / GIB:.1f} GiB", f"{each.step_seconds:.3g} s",
            )
            for each in plan.memory.strategies
        ],
    )  # fmt: skip
    if plan.axes:
        yield ""
        yield "each kind of parallelism alone, on the GPUs of a node:"
        yield from table(
            ("", "GPUs", "efficiency", "communication", "latency", "memory", "best when"),
            [
                (
                    each.name, str(each.ranks), f"{100 * each.efficiency:.0f} %", f"{each.communication_seconds:.2g} s", f"x {each.latency_ratio:.2f}",
                    f"x {each.memory_ratio:.2f}", each.best_use,
                )
                for each in plan.axes
            ],
        )  # fmt: skip


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table."""
    widths = [max(len(row[at]) for row in (titles, *rows)) for at in range(len(titles))]
    for row in (titles, *rows):
        yield "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
