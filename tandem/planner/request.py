"""What a plan is asked for: a model, GPUs and a batch. Imports no torch."""

from dataclasses import dataclass, replace
from typing import Literal

from tandem.config.trainer import TrainerConfig
from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.training.layout import Precision, Recompute, TrainingLayout
from tandem.layout.shapes import ModelShapes
from tandem.planner.layouts import check_batch, check_gpus
from tandem.types.errors import UserError

SAFE_SHARE = 0.95
"""Of a GPU's memory, what a recommended layout may need: predictions are right within 8 % on average."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """``recompute`` and ``micro_batch``: ``None`` lets the planner choose. ``trainer``: section ``trainer`` of a recipe, which Tandem's own trainer runs;
    ``None``: a trainer of the literature."""

    shapes: ModelShapes
    hardware: Hardware
    gpus: int
    sequence: int
    global_batch: int
    precision: Precision = "bf16"
    recompute: Recompute | None = None
    micro_batch: int | None = None
    trainer: TrainerConfig | None = None

    def check(self) -> None:
        """Raises ``UserError`` for what no machine trains."""
        check_gpus(self.gpus)
        check_batch(self.sequence, self.global_batch)
        if self.micro_batch is not None and not 1 <= self.micro_batch <= self.global_batch:
            raise UserError(f"--micro-batch is {self.micro_batch}; it must be from 1 to --global-batch {self.global_batch}")
        if self.precision not in self.hardware.peak_flops:
            known = ", ".join(self.hardware.peak_flops)
            raise UserError(f"--precision is {self.precision}, whose rate on {self.hardware.name} is unknown; known there: {known}")

    def completed(self, layout: TrainingLayout) -> TrainingLayout:
        """Returns ``layout`` with the trainer that runs it, whose memory is scored: Tandem's own for a recipe."""
        if self.trainer is None:
            return layout
        tokens = layout.micro_batch * layout.sequence
        trainer = replace(
            self.trainer, precision=layout.precision, recompute=own_recompute(layout.recompute), offload=layout.offload, micro_batch_tokens=tokens
        )
        return replace(layout, trainer=trainer, chunked_head=True, pass_tokens=tokens)


def own_recompute(recompute: Recompute) -> Literal["none", "selective", "full"]:
    """Returns ``trainer.recompute`` of a recipe by the planner's name."""
    return "selective" if recompute == "sp_selective" else recompute
