"""When to save: by steps, by minutes and on request, the same on every rank. Imports no torch, because a pod's controller uses it too."""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Literal

from tandem.config.checkpoint import CheckpointConfig
from tandem.runtime.process.stop_signals import SignalRequests

Due = Literal["nothing", "save", "stop"]


def copies_due(config: CheckpointConfig, step: int) -> frozenset[str]:
    """Returns the tiers before the run's folder that take a checkpoint of their own after ``step`` steps; none at the start, which the model's folder has."""
    every = {"memory": config.memory_every_steps, "local": config.local_every_steps}
    return frozenset(tier for tier, steps in every.items() if steps and step and step % steps == 0)


class CheckpointTrigger:
    """Decides when to save, with the agreement of all ranks in every step.

    Clocks differ between ranks and a signal may reach only one of them: the minutes are measured on the rank that ``is_first``, and a
    request on any rank counts. ``agree``: returns the logical or of each flag over all ranks."""

    def __init__(
        self, config: CheckpointConfig, requests: SignalRequests, *, is_first: bool = True,
        agree: Callable[[Sequence[bool]], Sequence[bool]] = lambda wanted: wanted, clock: Callable[[], float] = monotonic,
    ) -> None:  # fmt: skip
        self._config, self._requests, self._is_first, self._agree, self._clock = config, requests, is_first, agree, clock
        self._saved_s = clock()

    def due(self, step: int) -> Due:
        """Returns what to do with the state after ``step`` steps. ``stop``: save, then end. Every rank calls it in the same step."""
        late = 0 < 60 * self._config.every_minutes <= self._clock() - self._saved_s
        save, stop = self._agree([self._requests.save or (late and self._is_first), self._requests.stop])
        if stop:
            return "stop"
        return "save" if save or step % self._config.every_steps == 0 else "nothing"

    def saved(self) -> None:
        """Restarts the minutes and clears the request, because a save has started."""
        self._saved_s, self._requests.save = self._clock(), False
