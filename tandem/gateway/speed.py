"""How fast a backend gets through what it has been given."""

import time
from collections.abc import Callable
from dataclasses import dataclass

_SMOOTHING = 0.2
"""Of the newest measurement."""
_KEPT_S = 10.0
"""A measurement that is older says nothing: a backend that was slow would else be given nothing that shows that it no longer is."""


@dataclass
class Speed:
    """Tokens a second, measured from the beginning of attempts to the first bytes of their answers. ``clock``: monotonic seconds."""

    clock: Callable[[], float] = time.monotonic
    tokens_per_s: float = 0.0
    _measured_s: float = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """Notes that an answer began ``seconds`` after its attempt, when the backend had ``tokens`` tokens to compute."""
        rate = max(1, tokens) / max(seconds, 1e-6)
        self.tokens_per_s = rate if not self._is_known else (1 - _SMOOTHING) * self.tokens_per_s + _SMOOTHING * rate
        self._measured_s = self.clock()

    def seconds(self, tokens: int) -> float:
        """Returns about how long an answer takes to begin when there are ``tokens`` tokens to compute; 0 while nothing is known."""
        return tokens / self.tokens_per_s if self._is_known else 0.0

    @property
    def _is_known(self) -> bool:
        return bool(self.tokens_per_s) and self.clock() - self._measured_s <= _KEPT_S
