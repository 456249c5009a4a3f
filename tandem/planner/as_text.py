"""Plans and scores as text for people. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from tandem.layout.parameters import parameter_count
from tandem.planner.plan import Plan, named
from tandem.planner.score import Score
from tandem.planner.warnings import warnings_of
from tandem.planner.what_if import WhatIf

GIB = 2**30
SHOWN = 5
"""Layouts of a sweep that the table has."""
MOST_FRONT = 12


def score_text(score: Score) -> str:
    return "\n".join(_score_lines(score))


def plan_text(plan: Plan) -> str:
    return "\n".join(_plan_lines(plan))


def _score_lines(score: Score) -> Iterator[str]:
    yield f"{parameter_count(score.shapes) / 1e9:.2f}B parameters on {score.layout.gpus} x {score.hardware.name}: {named(score)}"
    yield ""
    memory = f"{score.memory.total / GIB:.1f} of {score.hardware.memory_bytes / GIB:.1f} GiB"
    yield from table(
        ("step", "tokens/s/GPU", "TFLOP/s/GPU", "MFU", "bubble", "memory", "$/10^9 tokens"),
        [(
            f"{score.step_seconds:.3g} s", f"{score.tokens_per_s_per_gpu:,.0f}", f"{score.model_tflops_per_gpu:.0f}", f"{score.mfu_percent:.1f} %",
            f"{100 * score.bubble_fraction:.1f} %", memory, _cost(score),
        )],
    )  # fmt: skip
    yield ""
    yield "memory of the fullest GPU, GiB: " + _shares(asdict(score.memory), GIB)
    yield "seconds of a step: " + _shares(asdict(score.time), 1.0)
    for warning in warnings_of(score):
        yield f"warning: {warning}"


def _cost(score: Score) -> str:
    return f"{score.dollars_per_billion_tokens:,.0f}" if score.dollars_per_billion_tokens else "unknown"


def what_if_text(base: Score, compared: Sequence[WhatIf], front: Sequence[tuple[str, Score]]) -> str:
    """Returns each change beside ``base``, and the front of all layouts."""
    rows = [("as asked", *_beside(base, base))]
    rows += [(each.words, *(_beside(each.score, base) if each.score is not None else ("none fits", *[""] * 7))) for each in compared]
    lines = ["", "what if:", *table(("", "layout", "GPUs", "step", "", "MFU", "$/10^9 tokens", "", "memory"), rows)]
    if front:
        lines += ["", "front of time, cost and memory of all of them:"]
        lines += table(
            ("", "layout", "GPUs", "step", "$/10^9 tokens", "memory"),
            [
                (words or "as asked", named(each), f"{each.layout.gpus:,}", f"{each.step_seconds:.3g} s", _cost(each), f"{each.memory.total / GIB:.1f} GiB")
                for words, each in front[:MOST_FRONT]
            ],
        )  # fmt: skip
        lines += [f"  and {len(front) - MOST_FRONT} more (--json has all)"] if len(front) > MOST_FRONT else []
    return "\n".join(lines)


def _beside(score: Score, base: Score) -> tuple[str, ...]:
    cost, before = score.dollars_per_billion_tokens, base.dollars_per_billion_tokens
    return (
        named(score), f"{score.layout.gpus:,} {score.hardware.name}", f"{score.step_seconds:.3g} s", f"x {score.step_seconds / base.step_seconds:.2f}",
        f"{score.mfu_percent:.1f} %", _cost(score), f"x {cost / before:.2f}" if cost and before else "", f"{score.memory.total / GIB:.1f} GiB",
    )  # fmt: skip


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
    yield f"fastest of {plan.sweep.considered:,} layouts, and the front of time, cost and memory (*):"
    on_front = {each.layout for each in plan.sweep.pareto}
    shown = {each.layout: each for each in (*plan.sweep.scored[:SHOWN], *plan.sweep.pareto[:SHOWN])}
    yield from table(
        ("", "layout", "step", "MFU", "$/10^9 tokens", "memory"),
        [
            (
                "*" if each.layout in on_front else "", named(each), f"{each.step_seconds:.3g} s", f"{each.mfu_percent:.1f} %", _cost(each),
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
