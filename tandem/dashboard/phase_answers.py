"""Parts of a run's timeline, one of its phases, and its traced steps."""

import time
from dataclasses import asdict
from typing import Any

from tandem.dashboard.open_run import OpenRun
from tandem.report.hidden import without_secrets
from tandem.report.timeline import traced_step
from tandem.runtime.records.run_lock import lock_holder
from tandem.runtime.records.tracing import read_trace
from tandem.types import UserError

STEPS_SHOWN = 6
"""Steps of a timeline that was asked for without a range."""


def phase_window(run: OpenRun, low: float | None, high: float | None, step: int | None) -> dict[str, Any]:
    """Returns the phases between two times (seconds since the first phase) or of a step; without both the newest steps."""
    is_live = lock_holder(run.directory) is not None
    with run.phases(low, step) as phases:
        now_s = time.time() - phases.began_s if is_live and len(phases) else None
        if step is not None:
            low, high = phases.of_steps(step, step)
        elif low is None or high is None:
            low, high = phases.of_steps(max(0, phases.steps[1] - STEPS_SHOWN + 1), phases.steps[1])
            high = now_s if now_s is not None else high
        return phases.window(low, max(high, low + 1e-6), now_s)


def phase_detail(run: OpenRun, id: int) -> dict[str, Any]:
    """Returns one phase with what the journal says of it. Raises ``UserError`` where there is none."""
    with run.journal() as journal:
        found = journal.transition_of(id)
    if found is None:
        raise UserError(f"there is no phase {id}; a resume may have removed it")
    return {**asdict(found), "detail": without_secrets("", found.detail)}


def trace_window(run: OpenRun, step: int) -> dict[str, Any]:
    """Returns a traced step in the form of the timeline: a lane for each rank. Raises ``UserError`` where the step was not traced."""
    facts, _ = run.facts()
    found = traced_step(step, read_trace(run.directory / "traces", step), facts.order if facts is not None else "1f1b")
    lanes: dict[int, list[list[Any]]] = {rank: [] for rank in found.bars["ranks"]}
    for group in found.bars["bars"]:
        for rank, start, seconds, _mark, detail in group["items"]:
            lanes[rank].append([start, round(start + seconds, 6), group["name"], step, 0, 0, detail])
    shown = [{"name": f"rank {rank}", "bars": sorted(bars)} for rank, bars in lanes.items()]
    end = max(found.bars["seconds"], 1e-6)
    left_out = {"left_out": found.left_out, "said": found.said}
    return {"lanes": shown, "from": 0.0, "to": end, "end": end, "began_s": 0.0, "steps": [step, step], "count": 0, **left_out}
