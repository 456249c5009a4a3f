"""What a tracker is: the calls that the process which follows a run makes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

Status = Literal["finished", "stopped"]
Value = float | int | str | bool | None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a tracker is told of the run. ``config``: the recipe as ``config.yaml`` has it."""

    name: str
    directory: Path
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A completion of a step. ``reward``: ``None`` where it could not be scored. ``parts``: the value of each reward function."""

    prompt: str
    completion: str
    reward: float | None
    parts: Mapping[str, float]


class Tracker(Protocol):
    """Receives the points of a run. Every method may raise; the tracker is then made anew, and begins where it had come to."""

    def begin(self, facts: RunFacts, first_step: int) -> int | None:
        """Begins, or goes back: the points of ``first_step`` and later that are there already are removed, since they are sent again.
        Returns the step from which rows are to be sent instead, where the tracker lacks rows before ``first_step``."""

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Adds samples of ``step``."""

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Adds the row of ``step`` in ``metrics.jsonl``."""

    def flush(self) -> None:
        """Returns when a killed process loses nothing of what was added."""

    def artefact(self, path: Path) -> None:
        """Adds a reference to a file or folder that the run has written."""

    def finish(self, status: Status) -> None:
        """The run has ended or was stopped."""


@runtime_checkable
class AppendOnlyTracker(Tracker, Protocol):
    """A tracker whose service cannot remove points. While the run trains it is sent the rows before the newest committed checkpoint, which
    no resume repeats."""

    def restart(self, facts: RunFacts) -> None:
        """Rows that it has were cut all the same (the newest checkpoint was damaged): ``begin`` follows, then all rows of the run, for a new
        run of the service."""
