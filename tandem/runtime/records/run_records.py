"""What a process of a run records: rows, phases and evaluations. The first rank, or the controller, records all of it; other ranks only
their phase."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from tandem.runtime.callback import Callback
from tandem.runtime.process.faults import FaultPoint, no_fault
from tandem.runtime.process.heartbeat_table import Heartbeat
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.logs import step_is
from tandem.runtime.records.metrics import MetricsFile
from tandem.runtime.traces.spans import span
from tandem.runtime.traces.steps import STEP


@dataclass
class Records:
    """The records of one process of a run.

    Args:
        journal, metrics: the run's files, in the one process that writes them.
        callback: receives the events of this rank only.
        board: the heartbeat that a supervisor reads.
        timings: seconds of each phase since the last row.
        row_began: when the step of the current row began.
    """

    journal: Journal | None
    metrics: MetricsFile | None
    callback: Callback
    board: Heartbeat | None = None
    fault_point: FaultPoint = no_fault
    timings: dict[str, float] = field(default_factory=dict)
    row_began: float = field(default_factory=perf_counter)
    sent_before: tuple[int, int, float] = (0, 0, 0.0)

    # -- phases --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str, step: int, sidecar: str = "trainer") -> Iterator[dict[str, Any]]:
        """Times the body as phase ``name`` of ``step``, journals it as a transition of ``sidecar``, whose detail it may fill, and reports it."""
        self.enter(name, step)
        self.callback.phase(name, step)
        began = perf_counter()
        no_journal: contextlib.AbstractContextManager[dict[str, Any]] = contextlib.nullcontext({})
        with (
            span(name, {STEP: step, "tandem.sidecar": sidecar}),
            no_journal if self.journal is None else self.journal.transition(step, sidecar, name) as detail,
        ):
            yield detail
        self.add_time(name, perf_counter() - began)
        self.fault_point(f"after:{name}:{step}")

    def enter(self, name: str, step: int) -> None:
        """Reports that a phase, or a part of one, begins."""
        step_is(step)
        if self.board is not None:
            self.board.phase_is(name, step)
        self.fault_point(f"before:{name}:{step}")

    def add_time(self, name: str, seconds: float) -> None:
        """Adds ``seconds`` to the time of ``name`` in the next row."""
        self.timings[name] = self.timings.get(name, 0.0) + seconds

    def progress(self, name: str) -> Callable[[int, int], None]:
        """Returns a function that reports the micro-batches done in phase ``name``."""

        def report(done: int, total: int) -> None:
            if self.board is not None:
                self.board.beat()
            self.callback.progress(name, done, total, "micro-batches")

        return report

    # -- evaluations ---------------------------------------------------------------------------------------------------

    def evaluation(self, step: int, kind: str) -> dict[str, Any] | None:
        """Returns the journal's evaluation ``kind`` of ``step``, ``None`` without one."""
        return None if self.journal is None else self.journal.evaluation(step, kind)

    def evaluated(self, step: int, kind: str, result: Mapping[str, Any]) -> None:
        """Journals an evaluation."""
        if self.journal is not None:
            self.journal.commit_evaluation(step, kind, dict(result))

    # -- rows ----------------------------------------------------------------------------------------------------------

    def begin_rows(self) -> None:
        """Starts the clock of the first row."""
        self.row_began = perf_counter()

    def sync(self) -> None:
        """Flushes the rows written so far to the disk."""
        if self.metrics is not None:
            self.metrics.sync()

    def row(
        self, row: Mapping[str, float | int], tokens: int, rates: Callable[[float], Mapping[str, float]] = lambda seconds: {}
    ) -> None:
        """Writes the row of a step on ``tokens`` tokens, with the seconds of its phases, this rank's traffic and ``rates(seconds of the step)``."""
        now = perf_counter()
        seconds, self.row_began = now - self.row_began, now
        timings, self.timings = self.timings, {}
        whole = {**row, **{f"timing_s/{name}": value for name, value in sorted(timings.items())}, **self._traffic()}
        whole["timing_s/step"] = whole["perf/time_per_step"] = seconds
        whole["perf/tokens_per_s"] = tokens / seconds
        whole |= rates(seconds)
        if self.metrics is not None:
            digest = self.metrics.append(whole)
            if self.journal is not None:
                self.journal.record_row(int(whole["step"]), digest)
            self.callback.row(whole)

    def _traffic(self) -> dict[str, float | int]:
        """Returns this rank's collectives since the last row."""
        if self.board is None:
            return {}
        now, before = (self.board.collectives, self.board.sent_bytes, self.board.waited_s), self.sent_before
        self.sent_before = now
        return {"comm/collectives": now[0] - before[0], "comm/sent_bytes": now[1] - before[1], "comm/wait_s": now[2] - before[2]}
