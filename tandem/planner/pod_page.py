"""The memory of a pod as sections of a page: a stacked bar for each phase and kind of memory. Imports no torch."""

import html
from collections.abc import Iterator, Sequence

from tandem.estimate.pod_phases import PhaseMemory
from tandem.planner.page_bars import bar_rows, figure, table
from tandem.planner.pod_memory import GIB, KINDS, PodMemoryPlan

TITLES = {"device": "the fullest GPU", "host": "the host of a machine", "disk": "the disk of a machine"}


def pod_sections(plan: PodMemoryPlan) -> Iterator[tuple[str, str]]:
    """Yields titles and contents: bars of each kind of memory, and their figures as a table."""
    if plan.refused:
        yield "Memory of the pod, by phase", f"<p class='alert'>Not predicted: {html.escape(plan.refused)}</p>"
        return
    shown = [(TITLES[kind], kind, plan.phases) for kind in KINDS]
    if plan.machines > 1:
        shown += [(f"the {kind}s of all {plan.machines} machines", kind, plan.everywhere) for kind in KINDS[1:]]
    for title, kind, phases in shown:
        rows = [(each.phase, getattr(each, kind)) for each in phases]
        limit = plan.hardware.memory_bytes if kind == "device" else 0.0
        content = (_note(plan) if kind == "device" else "") + bar_rows(rows, "GiB", GIB, limit)
        yield f"Memory of the pod, by phase: {title}", content + _figures(phases, kind)


def _note(plan: PodMemoryPlan) -> str:
    beside = "".join(f"<br>{html.escape(line)}" for line in plan.why)
    return (
        f"<p class='quiet'>Phases follow one another: training and generation are never added. residents.plan: {html.escape(plan.plan)}; on "
        f"{'a machine' if plan.machines == 1 else f'each of {plan.machines} machines'} {plan.ranks} ranks of the trainer, {plan.engines} engines.{beside}</p>"
    )


def _figures(phases: Sequence[PhaseMemory], kind: str) -> str:
    names = list(dict.fromkeys(name for each in phases for name, size in getattr(each, kind).items() if size))
    rows = [
        (html.escape(name.replace("_", " ")), *(figure(getattr(each, kind).get(name, 0) / GIB) for each in phases)) for name in names
    ]
    total = ("total", *(figure(sum(getattr(each, kind).values()) / GIB) for each in phases))
    return f"<details><summary>figures in GiB</summary>{table(('', *(each.phase for each in phases)), [*rows, total])}</details>"
