"""Whether a step's gradient may be used: dynamic loss scaling, and steps that are skipped because something is not finite."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from tandem.config.trainer import TrainerConfig

Verdict = Literal["taken", "backed_off", "skipped"]
_LEAST_SCALE = 1.0
_MOST_SCALE = 2.0**24


class GradScaler:
    """Judges every step of a run by its loss and its gradient norm, which are those of the global batch, so all ranks judge alike.

    With fp16 the loss is multiplied by ``scale`` before the backward (Micikevicius et al., 2018): halved where the gradient
    overflows, and that step is left out (``backed_off``); doubled after ``loss_scale_growth_steps`` steps in a row without. A step
    that is not finite without a scale to halve is ``skipped``; more than ``max_skipped_steps`` of those in a row, and the run is to
    stop (``is_exhausted``)."""

    def __init__(self, config: TrainerConfig) -> None:
        self.limit, self.growth_steps = config.max_skipped_steps, config.loss_scale_growth_steps
        self.is_scaling = config.precision == "fp16"
        self.scale = config.loss_scale if self.is_scaling else 1.0
        self.good_steps = self.backed_off = self.skipped = self.skipped_in_a_row = 0

    def judge(self, grad_norm: float, loss: float) -> Verdict:
        """What to do with a step whose gradient, divided by ``scale`` again, has ``grad_norm``; changes ``scale`` for the next."""
        if math.isfinite(grad_norm) and math.isfinite(loss):
            self.good_steps, self.skipped_in_a_row = self.good_steps + 1, 0
            if self.is_scaling and self.good_steps == self.growth_steps:
                self.scale, self.good_steps = min(2 * self.scale, _MOST_SCALE), 0
            return "taken"
        self.good_steps = 0
        if self.is_scaling and self.scale > _LEAST_SCALE and math.isfinite(loss):
            self.scale = max(self.scale / 2, _LEAST_SCALE)
            self.backed_off += 1
            return "backed_off"
        self.skipped, self.skipped_in_a_row = self.skipped + 1, self.skipped_in_a_row + 1
        return "skipped"

    @property
    def is_exhausted(self) -> bool:
        return self.skipped_in_a_row > self.limit

    def metrics(self) -> dict[str, float]:
        """For the row of a step; nothing where there is nothing to tell."""
        found: dict[str, float] = {"train/skipped_steps": self.skipped} if self.skipped else {}
        return found | ({"train/loss_scale": self.scale, "train/backed_off_steps": self.backed_off} if self.is_scaling else {})

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on with."""
        names = ("scale", "good_steps", "backed_off", "skipped", "skipped_in_a_row")
        return {name: getattr(self, name) for name in names}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, type(getattr(self, name))(value))
