"""Dynamic loss scaling and the non-finite guard: decides whether a step's gradient is used."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from tandem.config.trainer import TrainerConfig

Verdict = Literal["taken", "backed_off", "skipped"]
_LEAST_SCALE = 1.0
_MOST_SCALE = 2.0**24


class GradScaler:
    """Judges every step by its loss and gradient norm. Both are those of the global batch, so all ranks decide alike.

    With fp16 the loss is multiplied by ``scale`` before the backward pass (Micikevicius et al., 2018). If the gradient overflows, ``scale``
    is halved and the step is left out (``backed_off``); it doubles after ``loss_scale_growth_steps`` consecutive steps without an overflow.
    A non-finite step without a scale to halve is ``skipped``; after more than ``max_skipped_steps`` consecutive skipped steps the run must
    stop (``is_exhausted``)."""

    def __init__(self, config: TrainerConfig) -> None:
        self.limit, self.growth_steps = config.max_skipped_steps, config.loss_scale_growth_steps
        self.is_scaling = config.precision == "fp16"
        self.scale = config.loss_scale if self.is_scaling else 1.0
        self.good_steps = self.backed_off = self.skipped = self.skipped_in_a_row = 0

    def judge(self, grad_norm: float, loss: float) -> Verdict:
        """Returns the verdict on a step with the unscaled ``grad_norm``; updates ``scale`` for the next step."""
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
        """Returns the metrics of a step's row; empty if no step was skipped and no scale is used."""
        metrics: dict[str, float] = {"train/skipped_steps": self.skipped} if self.skipped else {}
        return metrics | ({"train/loss_scale": self.scale, "train/backed_off_steps": self.backed_off} if self.is_scaling else {})

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        names = ("scale", "good_steps", "backed_off", "skipped", "skipped_in_a_row")
        return {name: getattr(self, name) for name in names}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, type(getattr(self, name))(value))
