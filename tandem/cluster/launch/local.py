"""Runs on this machine, in the process of the command."""

import os
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.cluster.launch.launcher import Launch, LauncherName, Placed, Status
from tandem.config.recipe import load_config
from tandem.jobs.display import display
from tandem.jobs.finished import finished_result
from tandem.jobs.prepare import read_recipe
from tandem.jobs.start import dry_run, resume, train
from tandem.runtime.process.faults import FaultPlan
from tandem.runtime.process.program import program
from tandem.runtime.records.run_lock import lock_holder
from tandem.types import UserError


@dataclass(frozen=True)
class LocalLauncher:
    """``submit`` and ``resume`` return when the run has ended."""

    inline: bool = False
    fault: str = ""
    name: LauncherName = "local"

    def plan(self, launch: Launch) -> str:
        return dry_run(load_config(launch.recipe, launch.overrides), launch.recipe, launch.inline)

    def submit(self, launch: Launch) -> Placed:
        recipe = load_config(launch.recipe, launch.overrides)
        with display() as callback:
            result = train(
                recipe, recipe_path=launch.recipe, inline=launch.inline, callbacks=[callback], progress=False,
                faults=FaultPlan.parse(launch.fault) if launch.fault else None,
            )
        return Placed(result.directory, result.summary())

    def resume(self, directory: Path, overrides: Sequence[str]) -> Placed:
        with display() as callback:
            result = resume(
                directory, inline=self.inline, callbacks=[callback], progress=False, overrides=overrides,
                faults=FaultPlan.parse(self.fault) if self.fault else None,
            )
        return Placed(result.directory, result.summary())

    def status(self, directory: Path) -> Status:
        holder = lock_holder(directory)
        if holder is not None:
            return Status("running", f"process {holder} on this machine")
        return Status("finished" if finished_result(read_recipe(directory), directory) is not None else "stopped")

    def logs(self, directory: Path) -> tuple[Path, ...]:
        """The log of the process that leads the run: what it tells its user is on the terminal."""
        leading = (directory / "logs" / f"{role}.log" for role in ("controller", "trainer"))
        return tuple(path for path in leading if path.is_file())[:1]

    def cancel(self, directory: Path, *, at_once: bool) -> str:
        holder = lock_holder(directory)
        if holder is None:
            raise UserError(f"the run in '{directory}' is not running on this machine, so there is nothing to cancel")
        if at_once:
            os.kill(holder, signal.SIGKILL)
            return f"killed process {holder}; '{program()} resume {shlex.quote(str(directory))}' continues from the newest checkpoint"
        os.kill(holder, signal.SIGTERM)
        return f"asked process {holder} to stop after its step, which it saves first"
