"""The parts of single steps in the Trace Event Format that Chrome and Perfetto open: one line for each span, one file for each rank and step.

The same spans go to the collector of section ``traces``, if there is one, as parts of the call that the step is made by.
"""

import contextlib
import json
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.runtime.traces.context import OUTSIDE, current, enter, leave
from tandem.runtime.traces.spans import OpenSpan
from tandem.types import UserError

CALL = "call"
"""The category of a call of a worker."""


@dataclass(frozen=True, slots=True)
class Span:
    """``name`` began at ``start_s`` (seconds since the epoch) on ``rank`` and took ``seconds``. ``arguments``: its other values, such as
    ``micro_batch`` and ``stage``. ``thread``: 0 for the thread that the step runs on. ``category``: empty for a part of the step, ``call`` for a
    call of a worker, the name of the group for the wait for a collective."""

    name: str
    rank: int
    start_s: float
    seconds: float
    thread: int
    arguments: dict[str, int]
    category: str = ""

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds


class Tracer:
    """Records the steps in ``steps`` under ``directory``. In other steps a span costs one comparison. ``labels`` are added to the arguments of
    every span of this rank."""

    def __init__(
        self, directory: Path | None = None, rank: int = 0, steps: Collection[int] = (), labels: Mapping[str, int] | None = None
    ) -> None:
        self._directory, self._rank, self._steps, self._labels = directory, rank, frozenset(steps), dict(labels or {})
        self._lock = threading.Lock()
        self._main = threading.get_ident()
        self._path: Path | None = None
        self._step: int | None = None

    def begin(self, step: int) -> None:
        """Begins ``step``, which ends where the next one begins. Drops an earlier trace of the same step."""
        self._path, self._step = None, step
        if self._directory is not None and step in self._steps:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._path = self._directory / f"step-{step}-rank-{self._rank}.json"
            # The format's closing bracket is optional, so the file of a killed process is valid.
            self._path.write_text("[\n", encoding="utf-8")

    def enter(self, step: int) -> None:
        """Begins ``step`` unless it has begun."""
        if step != self._step:
            self.begin(step)

    def span(self, name: str, category: str = "", **arguments: int) -> contextlib.AbstractContextManager[None]:
        """Records the block as ``name``. A block that begins in a traced step, on any thread, may end after it."""
        return contextlib.nullcontext() if self._path is None else self._record(name, category, self._path, arguments)

    @contextlib.contextmanager
    def _record(self, name: str, category: str, path: Path, arguments: dict[str, int]) -> Iterator[None]:
        # A call has its span already, from its frame.
        parent = None if category == CALL else current()
        opened = OpenSpan(name, OUTSIDE, "", "internal", {}) if parent is None else OpenSpan(name, parent.child(), parent.span_id, "internal", arguments)
        if category and parent is not None:
            opened.update({"tandem.group": category})
        token = None if parent is None else enter(opened.context)
        try:
            yield
        finally:
            if token is not None:
                leave(token)
            span = opened.end()
            thread = 0 if threading.get_ident() == self._main else threading.get_native_id()
            event = {
                "name": name, "cat": category, "ph": "X", "ts": span.start_ns / 1000, "dur": (span.end_ns - span.start_ns) / 1000, "pid": self._rank,
                "tid": thread, "args": {**arguments, **self._labels},
            }  # fmt: skip
            with self._lock, path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + ",\n")


NO_TRACE = Tracer()


def traced_steps(directory: Path) -> list[int]:
    """Returns the steps that have a trace in ``directory``, ascending."""
    return sorted({int(path.name.split("-")[1]) for path in directory.glob("step-*-rank-*.json")})


def read_trace(directory: Path, step: int) -> list[Span]:
    """Returns every rank's spans of ``step``, by their start. Raises ``UserError`` where there are none or a file is not a trace."""
    spans = []
    for path in sorted(directory.glob(f"step-{step}-rank-*.json")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line in ("[", ""):
                continue
            try:
                event = json.loads(line.rstrip(","))
                times, arguments = (event["ts"] / 1e6, event["dur"] / 1e6), dict(event["args"])
                spans.append(Span(event["name"], event["pid"], *times, event["tid"], arguments, event.get("cat", "")))
            except (ValueError, KeyError, TypeError):
                raise UserError(f"'{path}' is not a trace: its line '{line[:40]}' cannot be read; remove the file") from None
    if not spans:
        raise UserError(f"'{directory}' has no trace of step {step}; name the step in run.trace_steps before the run")
    return sorted(spans, key=lambda span: span.start_s)
