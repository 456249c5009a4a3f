"""What a rank did in a step and when, in the Trace Event Format that Chrome and Perfetto open: a line an event, a file a rank and step."""

import contextlib
import json
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem.types import UserError


@dataclass(frozen=True, slots=True)
class Span:
    """``name`` began at ``start_s`` (seconds since the epoch) on ``rank`` and took ``seconds``. ``arguments``: what else is said of
    it, ``micro_batch`` and ``stage`` among them. ``thread``: 0 for the thread that the step runs on. ``category``: empty for a part of the
    step, ``call`` for a call of a worker, and for the wait for a collective the group of its ranks."""

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
    """Records the steps named in ``steps`` under ``directory``. Outside of them a span costs a comparison. ``labels`` are said of every
    span of this rank."""

    def __init__(
        self, directory: Path | None = None, rank: int = 0, steps: Collection[int] = (), labels: Mapping[str, int] | None = None
    ) -> None:
        self._directory, self._rank, self._steps, self._labels = directory, rank, frozenset(steps), dict(labels or {})
        self._lock = threading.Lock()
        self._main = threading.get_ident()
        self._path: Path | None = None
        self._step: int | None = None

    def begin(self, step: int) -> None:
        """``step`` begins, and ends where the next one begins. What was recorded of it before is dropped."""
        self._path, self._step = None, step
        if self._directory is not None and step in self._steps:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._path = self._directory / f"step-{step}-rank-{self._rank}.json"
            # The closing bracket is optional in this format, for files that a killed process leaves.
            self._path.write_text("[\n", encoding="utf-8")

    def enter(self, step: int) -> None:
        """``begin``, unless ``step`` has begun."""
        if step != self._step:
            self.begin(step)

    def span(self, name: str, category: str = "", **arguments: int) -> contextlib.AbstractContextManager[None]:
        """Record the block as ``name``. One that begins in a traced step, on any thread, may end after it."""
        return contextlib.nullcontext() if self._path is None else self._record(name, category, self._path, arguments)

    @contextlib.contextmanager
    def _record(self, name: str, category: str, path: Path, arguments: dict[str, int]) -> Iterator[None]:
        start, began = time.time_ns(), time.perf_counter_ns()
        try:
            yield
        finally:
            took = time.perf_counter_ns() - began
            thread = 0 if threading.get_ident() == self._main else threading.get_native_id()
            event = {
                "name": name, "cat": category, "ph": "X", "ts": start / 1000, "dur": took / 1000, "pid": self._rank, "tid": thread,
                "args": {**arguments, **self._labels},
            }  # fmt: skip
            with self._lock, path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + ",\n")


NO_TRACE = Tracer()


def traced_steps(directory: Path) -> list[int]:
    """The steps that have a trace in ``directory``, ascending."""
    return sorted({int(path.name.split("-")[1]) for path in directory.glob("step-*-rank-*.json")})


def read_trace(directory: Path, step: int) -> list[Span]:
    """Every rank's spans of ``step``, by their start. Raises ``UserError`` where there are none or a file is none of ours."""
    found = []
    for path in sorted(directory.glob(f"step-{step}-rank-*.json")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line in ("[", ""):
                continue
            try:
                event = json.loads(line.rstrip(","))
                times, arguments = (event["ts"] / 1e6, event["dur"] / 1e6), dict(event["args"])
                found.append(Span(event["name"], event["pid"], *times, event["tid"], arguments, event.get("cat", "")))
            except (ValueError, KeyError, TypeError):
                raise UserError(f"'{path}' is not a trace: its line '{line[:40]}' cannot be read; remove the file") from None
    if not found:
        raise UserError(f"'{directory}' has no trace of step {step}; name the step in run.trace_steps before the run")
    return sorted(found, key=lambda span: span.start_s)
