"""When to save: by steps, by minutes and on request, the same on every rank."""

from collections.abc import Callable
from time import monotonic
from typing import Literal

import torch

from tandem.config.checkpoint import PretrainCheckpointConfig
from tandem.runtime.communicator import Communicator
from tandem.runtime.requests import SignalRequests

Due = Literal["nothing", "save", "stop"]


class CheckpointTrigger:
    """Clocks differ between ranks and a signal may reach one of them only, so every step all ranks agree: the minutes are rank 0's,
    a request is anybody's. ``ranks``: those that save together."""

    def __init__(
        self, config: PretrainCheckpointConfig, ranks: Communicator, requests: SignalRequests, clock: Callable[[], float] = monotonic
    ) -> None:
        self._config, self._ranks, self._requests, self._clock = config, ranks, requests, clock
        self._saved_s = clock()

    def due(self, step: int) -> Due:
        """What the state after ``step`` steps asks for. ``stop``: save, then end. Every rank calls it in the same step."""
        late = 0 < 60 * self._config.every_minutes <= self._clock() - self._saved_s
        wanted = [self._requests.save or (late and self._ranks.rank == 0), self._requests.stop]
        save, stop = self._ranks.all_gather(torch.tensor(wanted), "whether to save").any(dim=0).tolist()
        if stop:
            return "stop"
        return "save" if save or step % self._config.every_steps == 0 else "nothing"

    def saved(self) -> None:
        """A save has begun: the minutes count anew, and the request is met."""
        self._saved_s, self._requests.save = self._clock(), False
