"""What a plan is asked for: a model, GPUs and a batch. Imports no torch."""

from dataclasses import dataclass

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.training.layout import Precision, Recompute
from tandem.layout.shapes import ModelShapes
from tandem.planner.layouts import check_batch, check_gpus
from tandem.types.errors import UserError

SAFE_SHARE = 0.95
"""Of a GPU's memory, what a recommended layout may need: predictions are right within 8 % on average."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """``recompute`` and ``micro_batch``: ``None`` lets the planner choose."""

    shapes: ModelShapes
    hardware: Hardware
    gpus: int
    sequence: int
    global_batch: int
    precision: Precision = "bf16"
    recompute: Recompute | None = None
    micro_batch: int | None = None

    def check(self) -> None:
        """Raises ``UserError`` for what no machine trains."""
        check_gpus(self.gpus)
        check_batch(self.sequence, self.global_batch)
        if self.precision not in self.hardware.peak_flops:
            known = ", ".join(self.hardware.peak_flops)
            raise UserError(f"--precision is {self.precision}, whose rate on {self.hardware.name} is unknown; known there: {known}")
