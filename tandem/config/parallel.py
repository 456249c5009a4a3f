"""Section ``parallel``: how many processes train one model, and what each of them holds."""

from dataclasses import dataclass
from typing import Literal

from tandem.types.errors import UserError

AXES = ("data", "tensor", "pipeline", "context", "expert")


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """``data``, ``tensor``, ``pipeline``, ``context``: ranks along each axis of the mesh; their product is the number of
    processes. ``expert``: ranks that share the experts of a layer; it divides data x context.

    ``zero``: what the data-parallel ranks cut between them: 0 nothing, 1 the optimizer's state, 2 the gradients too, 3 the
    parameters too. ``collective_timeout_s``: seconds after which a collective that does not end is a hang.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    collective_timeout_s: float = 300.0

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    def check(self) -> None:
        """Raise ``UserError`` for a mesh that cannot be."""
        for name in AXES:
            if getattr(self, name) < 1:
                raise UserError(f"'parallel.{name}' is {getattr(self, name)}; it must be at least 1")
        if self.data * self.context % self.expert:
            raise UserError(f"'parallel.expert' is {self.expert}; it must divide parallel.data x parallel.context = {self.data * self.context}")
        if not 0 < self.collective_timeout_s < float("inf"):
            raise UserError(f"'parallel.collective_timeout_s' is {self.collective_timeout_s}; it must be above 0, and finite")
