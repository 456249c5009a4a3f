"""The learning rate as a pure function of the step."""

import math

from tandem.config.trainer import TrainerConfig


def learning_rate(config: TrainerConfig, step: int, total_steps: int) -> float:
    """Returns the learning rate of optimizer step ``step``, counted from 0, of a run of ``total_steps``.

    Warm-up of w steps: ``(step + 1) / w`` of the full rate, so that no step is taken with a rate of 0 and step w - 1
    has all of it. Then ``constant``, or down to ``min_lr_ratio`` at ``total_steps``: ``linear``,
    ``cosine`` (Loshchilov and Hutter, 2017, equation 5, without restarts), or ``wsd``: stable, then a straight line in the last ``decay_steps``
    (warm-up, stable, decay: Hu et al., 2024, section 4; the line: Haegele et al., 2024)."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    assert total_steps > config.warmup_steps, (total_steps, config.warmup_steps)
    falling = config.decay_steps if config.schedule == "wsd" else total_steps - config.warmup_steps
    progress = min(1.0, max(0.0, (step - total_steps + falling) / falling))
    left = 1.0 - progress if config.schedule != "cosine" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)
