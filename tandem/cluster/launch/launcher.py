"""What every launcher does: places a run on machines, says where it is, and ends it. No scheduler of our own: a launcher asks one that exists.

A run is its folder, on any launcher: ``tandem.cluster.launch.record`` has which launcher that was, and everything else that a launcher needs to know of a
run is in the folder too. The machines of a run share that folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

LauncherName = Literal["local", "slurm", "ray", "kubernetes"]
LAUNCHERS: tuple[LauncherName, ...] = ("local", "slurm", "ray", "kubernetes")

State = Literal["queued", "running", "finished", "stopped", "failed"]
"""``finished``: it has taken all of its steps; ``stopped``: a resume continues it; ``failed``: so it does, but its last process ended with an error."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A run to place. ``recipe``: a file, or the name of one that comes with Tandem. ``inline`` and ``fault``: of a run in this process alone. ``array``: the
    further overrides of each run of a sweep, of which ``array_limit`` run at once, all with 0; empty for one run."""

    recipe: str
    overrides: tuple[str, ...] = ()
    inline: bool = False
    fault: str = ""
    array: tuple[tuple[str, ...], ...] = ()
    array_limit: int = 0


@dataclass(frozen=True, slots=True)
class Placed:
    """A run that was placed, or has ended here. ``text``: what the user is told."""

    directory: Path
    text: str


@dataclass(frozen=True, slots=True)
class Status:
    """Where a run is. ``where``: the process or the job, with its machines, empty if there is none. ``reason``: why it waits, or how it ended."""

    state: State
    where: str = ""
    reason: str = ""

    @property
    def is_active(self) -> bool:
        return self.state in ("queued", "running")


class Launcher(Protocol):
    """Raises ``UserError``, in one line and before anything is placed, for what cannot be placed."""

    @property
    def name(self) -> LauncherName: ...

    def plan(self, launch: Launch) -> str:
        """Returns what ``submit`` would do, after its checks (``--dry-run``)."""
        ...

    def submit(self, launch: Launch) -> Placed:
        """Begins a run in a new folder."""
        ...

    def resume(self, directory: Path, overrides: Sequence[str]) -> Placed:
        """Continues the run in ``directory``, with new values of the keys that a resume may change."""
        ...

    def status(self, directory: Path) -> Status:
        """Returns where the run is now."""
        ...

    def logs(self, directory: Path) -> tuple[Path, ...]:
        """Returns the files with what the run tells its user, the oldest first."""
        ...

    def cancel(self, directory: Path, *, at_once: bool) -> str:
        """Asks the run to finish its step, save it and stop; ``at_once``: ends it now. Returns what was done."""
        ...
