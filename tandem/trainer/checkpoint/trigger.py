"""When to save: by steps, by minutes and on request, the same on every rank. Imports no torch: a pod's controller asks too."""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Literal

from tandem.config.checkpoint import CheckpointConfig
from tandem.runtime.process.stop_signals import SignalRequests

Due = Literal["nothing", "save", "stop"]


class CheckpointTrigger:
    """Clocks differ between ranks and a signal may reach one of them only, so every step all ranks agree: the minutes are those of the rank
    that ``is_first``, a request is anybody's. ``agree``: flags of which each holds if it does on any rank."""

    def __init__(
        self, config: CheckpointConfig, requests: SignalRequests, *, is_first: bool = True,
        agree: Callable[[Sequence[bool]], Sequence[bool]] = lambda wanted: wanted, clock: Callable[[], float] = monotonic,
    ) -> None:  # fmt: skip
        self._config, self._requests, self._is_first, self._agree, self._clock = config, requests, is_first, agree, clock
        self._saved_s = clock()

    def due(self, step: int) -> Due:
        """What the state after ``step`` steps asks for. ``stop``: save, then end. Every rank calls it in the same step."""
        late = 0 < 60 * self._config.every_minutes <= self._clock() - self._saved_s
        save, stop = self._agree([self._requests.save or (late and self._is_first), self._requests.stop])
        if stop:
            return "stop"
        return "save" if save or step % self._config.every_steps == 0 else "nothing"

    def saved(self) -> None:
        """A save has begun: the minutes count anew, and the request is met."""
        self._saved_s, self._requests.save = self._clock(), False
