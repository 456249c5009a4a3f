"""Section ``run``: the run's name, folder and limits."""

import re
from dataclasses import dataclass
from typing import Literal

from tandem.config.limits import check_at_least_one
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The run's name, folder and limits."""

    name: str = ""
    """Name of the run's folder under `directory`. Empty: the recipe's name, then `NAME-2`, `NAME-3` and so on. An existing name is
    refused."""
    directory: str = "runs"
    """Folder of all runs."""
    seed: int = 0
    """Seed of every random number of the run."""
    max_steps: int = 200
    """Maximum number of optimizer steps, not counting those of section `sft`. A resume may raise it, also after the end of the run, unless the learning
    rate has begun to fall towards it."""
    max_restarts: int = 20
    """Maximum number of times that the processes of a run are restarted after one died or hung (see `training.md`)."""
    elastic: bool = False
    """Continue with fewer data-parallel ranks after the same rank was lost twice with no step completed in between. The results are then not
    those of the recipe's `parallel.data`, which the last line, the report and the model registry say. `false`: every restart has all ranks."""
    on_mismatch: Literal["warn", "stop"] = "warn"
    """If rollout and trainer disagree (`mismatch_kl` is not 0) where they compute the same bits: `warn` on the screen, in the journal and in
    the report, or `stop` the run as well."""
    trace_steps: tuple[int, ...] = ()
    """Steps for which every trainer rank records a trace in `traces/`; see `training.md`."""

    def check(self) -> None:
        if self.name and not re.fullmatch(r"[\w][\w.+-]*", self.name):
            raise UserError(f"'run.name' is '{self.name}'; use letters, digits, '.', '_', '+' and '-', not starting with a sign")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"'run.seed' is {self.seed}; it must be between 0 and 2^63 - 1")
        check_at_least_one("run", self, "max_steps")
        if self.max_restarts < 0:
            raise UserError(f"'run.max_restarts' is {self.max_restarts}; it must be 0 (none) or more")
        if self.trace_steps and min(self.trace_steps) < 0:
            raise UserError(f"'run.trace_steps' has {min(self.trace_steps)}; steps are counted from 0")
        if self.trace_steps and max(self.trace_steps) >= self.max_steps:
            raise UserError(
                f"'run.trace_steps' has {max(self.trace_steps)}, a step that is never run: run.max_steps is {self.max_steps} and steps are counted "
                "from 0; lower it or raise run.max_steps"
            )
