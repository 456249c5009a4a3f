"""Section ``run``: what this run is called, where it lives and how long it may go on."""

import re
from dataclasses import dataclass

from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class RunConfig:
    """``name``: the folder under ``directory``; empty takes the recipe's name and, where that exists, the next free
    ``NAME-2``, ``NAME-3``. ``seed``: every random number of the run follows from it. ``max_steps``: optimizer steps after
    the warm-up at most. ``max_restarts``: how often a run in several processes starts its ranks again from the newest checkpoint,
    because one died or hung, before it gives up. ``trace_steps``: steps of which every rank writes down what it does when, to
    ``traces/``."""

    name: str = ""
    directory: str = "runs"
    seed: int = 0
    max_steps: int = 200
    max_restarts: int = 20
    trace_steps: tuple[int, ...] = ()

    def check(self) -> None:
        if self.name and not re.fullmatch(r"[\w][\w.+-]*", self.name):
            raise UserError(f"'run.name' is '{self.name}'; use letters, digits, '.', '_', '+' and '-', not starting with a sign")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"'run.seed' is {self.seed}; it must be between 0 and 2^63 - 1")
        if self.max_steps < 1:
            raise UserError(f"'run.max_steps' is {self.max_steps}; it must be at least 1")
        if self.max_restarts < 0:
            raise UserError(f"'run.max_restarts' is {self.max_restarts}; it must be 0 (none) or more")
        if self.trace_steps and min(self.trace_steps) < 0:
            raise UserError(f"'run.trace_steps' has {min(self.trace_steps)}; steps are counted from 0")
