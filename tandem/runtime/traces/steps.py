"""The trace of a training step, which every process of a run finds by itself."""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from tandem.config.traces import TracesConfig
from tandem.runtime.traces.context import SpanContext, derived_trace
from tandem.runtime.traces.spans import OpenSpan, begin, begin_first

STEP = "tandem.step"
"""The attribute that has the step."""


def trace_of_step(directory: Path, step: int, ratio: float = 1.0, attempt: str = "") -> SpanContext:
    """Returns the span of ``step`` of the run in ``directory``. A step that is taken again, after a fault or a resume, is another ``attempt`` in the same
    trace."""
    return derived_trace(f"{directory.resolve()}\0{step}", attempt or os.urandom(8).hex(), ratio)


def step_span(config: TracesConfig | None, directory: Path, step: int, *, rank: int = 0, attempt: str = "") -> "AbstractContextManager[OpenSpan | None]":
    """Records the block as ``step`` of the run in ``directory``, on a rank other than 0 as a part of it. ``attempt``: what the ranks know of it alike. Without
    ``config`` it records nothing."""
    if config is None:
        return nullcontext()
    context, attributes = trace_of_step(directory, step, config.ratio(1.0), attempt), {STEP: step}
    opened = begin_first("step", context, attributes) if rank == 0 else begin(f"step on rank {rank}", context, attributes)
    return nullcontext() if opened is None else opened
