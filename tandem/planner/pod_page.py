"""The memory of a pod as sections of a page: a stacked bar for each phase and kind of memory. Imports no torch."""

import html
from collections.abc import Iterator

from tandem.planner.page_bars import bar_rows, figure, table
from tandem.planner.pod_memory import GIB, KINDS, PodMemoryPlan

TITLES = {"device": "the fullest GPU", "host": "the host of a machine", "disk": "the disk of a machine"}


def pod_sections(plan: PodMemoryPlan) -> Iterator[tuple[str, str]]:
    """Yields titles and contents: bars of each kind of memory, and their figures as a table."""
    if plan.refused:
        yield "Memory of the pod, by phase", f"<p class='alert'>Not predicted: {html.escape(plan.refused)}</p>"
        return
    for kind in KINDS:
        rows = [(each.phase, getattr(each, kind)) for each in plan.phases]
        limit = plan.hardware.memory_bytes if kind == "device" else 0.0
        content = (_note(plan) if kind == "device" else "") + bar_rows(rows, "GiB", GIB, limit)
        yield f"Memory of the pod, by phase: {TITLES[kind]}", content + _figures(plan, kind)


def _note(plan: PodMemoryPlan) -> str:
    beside = "".join(f"<br>{html.escape(line)}" for line in plan.why)
    return (
        f"<p class='quiet'>Phases follow one another: training and generation are never added. residents.plan: {html.escape(plan.plan)}; on a machine "
        f"{plan.ranks} ranks of the trainer, {plan.engines} engines.{beside}</p>"
    )


def _figures(plan: PodMemoryPlan, kind: str) -> str:
    names = list(dict.fromkeys(name for each in plan.phases for name, size in getattr(each, kind).items() if size))
    rows = [
        (html.escape(name.replace("_", " ")), *(figure(getattr(each, kind).get(name, 0) / GIB) for each in plan.phases)) for name in names
    ]
    total = ("total", *(figure(sum(getattr(each, kind).values()) / GIB) for each in plan.phases))
    return f"<details><summary>figures in GiB</summary>{table(('', *(each.phase for each in plan.phases)), [*rows, total])}</details>"
