"""A whole plan: the recommendation of the rules, what beats it, and the advice beside it. Imports no torch."""

from dataclasses import dataclass, replace

from tandem.planner.axes import Axis, compare_axes
from tandem.planner.memory_rules import MemoryAdvice, memory_advice
from tandem.planner.request import PlanRequest
from tandem.planner.rules import Advice, advise
from tandem.planner.score import Score, score
from tandem.planner.search import Progress, Sweep, sweep
from tandem.types.errors import UserError

BEATEN_BY = 0.02
"""The rule counts as beaten by a layout that is faster by more than this share, which the error of the time model exceeds."""


@dataclass(frozen=True, slots=True)
class Plan:
    """``rule``: the score of the matrix's layout. ``chosen``: the layout to take: the rule's unless a neighbour beats it or it does not fit. ``verdict``:
    which, and by how much, in a sentence."""

    request: PlanRequest
    advice: Advice
    rule: Score
    sweep: Sweep
    chosen: Score
    verdict: str
    memory: MemoryAdvice
    axes: tuple[Axis, ...]


def make_plan(request: PlanRequest, progress: Progress | None = None) -> Plan:
    """Returns the plan for ``request``. Raises ``UserError`` for a model that fits in no layout, with the smallest change that would."""
    request.check()
    advice = advise(request)
    rule, found = score(request.shapes, advice.layout, request.hardware), sweep(request, progress)
    if found.best is None:
        raise UserError(cannot_fit(request, found.nearest or rule))
    chosen, verdict = _verdict(rule, found.best)
    return Plan(request, advice, rule, found, chosen, verdict, memory_advice(request), tuple(compare_axes(request)))


def _verdict(rule: Score, best: Score) -> tuple[Score, str]:
    if not rule.fits:
        return best, f"the rule's layout does not fit ({rule.memory.total / 2**30:.1f} GiB); {named(best)} does"
    gain = rule.step_seconds / best.step_seconds - 1
    if gain > BEATEN_BY:
        return best, f"{named(best)} beats the rule by {100 * gain:.0f} %: {best.step_seconds:.3g} s a step instead of {rule.step_seconds:.3g} s"
    return rule, "no neighbouring layout beats the rule by more than the error of the prediction"


def named(scored: Score) -> str:
    """Returns a layout in a few words, such as ``TP 8, PP 2, DP 48, ZeRO 1``."""
    layout, parallel = scored.layout, scored.layout.parallel
    parts = [
        f"{name} {size}" for name, size in (
            ("TP", parallel.tensor), ("PP", parallel.pipeline), ("virtual PP", parallel.virtual_stages), ("CP", parallel.context), ("EP", parallel.expert),
            ("DP", parallel.data), ("ZeRO", parallel.zero),
        ) if size > (0 if name == "ZeRO" else 1)
    ]  # fmt: skip
    parts += [f"micro-batch {layout.micro_batch}"] + ([f"{layout.recompute} recomputation"] if layout.recompute != "none" else [])
    return ", ".join(parts)


def cannot_fit(request: PlanRequest, nearest: Score) -> str:
    """Returns one line: what is missing, and the smallest change that would fit."""
    needed, available = nearest.memory.total / 2**30, request.hardware.memory_bytes / 2**30
    return (
        f"no layout of {request.gpus} x {request.hardware.name} fits: the nearest ({named(nearest)}) needs {needed:.1f} GiB of {available:.1f} GiB on a GPU; "
        f"{smallest_change(request, nearest)}"
    )


def smallest_change(request: PlanRequest, nearest: Score) -> str:
    """Returns the first of the changes, from the cheapest on, with which a layout fits."""
    layout, shapes, memory = nearest.layout, nearest.shapes, request.hardware.memory_bytes
    changes = [
        (f"--micro-batch 1 fits ({layout.micro_batch} now)", replace(layout, micro_batch=1)),
        ("--recompute full fits", replace(layout, micro_batch=1, recompute="full")),
        ("--offload cpu, the optimizer's state in host memory, fits", replace(layout, micro_batch=1, recompute="full", offload="cpu")),
    ]  # fmt: skip
    for words, changed in changes:
        if changed != layout and score(shapes, request.completed(changed), request.hardware).memory.total <= memory:
            return words
    gpus = request.gpus
    while gpus < 1_000_000:
        gpus *= 2
        more = replace(request, gpus=gpus, global_batch=max(request.global_batch, gpus), recompute="full", micro_batch=1)
        if sweep(more).best is not None:
            return f"{gpus} GPUs fit" + (f" with --global-batch {more.global_batch}" if more.global_batch != request.global_batch else "")
    return f"shorten --seq {request.sequence}, or take GPUs with more memory"
