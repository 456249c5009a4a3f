"""The learning rate as a pure function of the step."""

import math

from tandem.config.trainer import TrainerConfig


def learning_rate(config: TrainerConfig, step: int) -> float:
    """The learning rate of optimizer step ``step``, counted from 0.

    Warm-up of w steps: ``(step + 1) / w`` of the full rate, so that no step is taken with a rate of 0 and step w - 1
    has all of it. Then ``constant``, or down to ``final_share`` at ``total_steps``: ``linear``, or ``cosine``
    (Loshchilov and Hutter, 2017, equation 5, without restarts)."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    left = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * (config.final_share + (1.0 - config.final_share) * left)
