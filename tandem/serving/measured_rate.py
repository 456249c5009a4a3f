"""How many tokens a second something takes, by newest measurements."""

_SMOOTHING = 0.2
"""Of the newest one."""


class MeasuredRate:
    """``per_s``: tokens a second, 0 while nothing was measured."""

    def __init__(self) -> None:
        self.per_s = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        rate = tokens / max(seconds, 1e-6)
        self.per_s = rate if not self.per_s else (1 - _SMOOTHING) * self.per_s + _SMOOTHING * rate
