"""Section ``run``: what this run is called, where it lives and how long it may go on."""

import re
from dataclasses import dataclass

from tandem.config.limits import check_at_least_one
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What the run is called, where it lives and how long it may go on."""

    name: str = ""
    """The folder under `directory`. Empty: the recipe's name, then `NAME-2`, `NAME-3` and so on. A name that exists is refused."""
    directory: str = "runs"
    """The folder of all runs."""
    seed: int = 0
    """Every random number of the run follows from it."""
    max_steps: int = 200
    """Optimizer steps at most, after those of section `sft`."""
    max_restarts: int = 20
    """How often the processes of a run are started again because one died or hung, before the run gives up (see `training.md`)."""
    trace_steps: tuple[int, ...] = ()
    """Steps of which every rank of the trainer records what it does when, in `traces/`: see `training.md`."""

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
