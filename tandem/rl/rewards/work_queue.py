"""The samples that are ready to be judged, from which the workers of a pool take their shares."""

import math
import threading
from collections import deque
from collections.abc import Sequence

from tandem.rl.rewards.judging import Unit


class WorkQueue:
    """Units in the order in which they became ready. ``workers``: those that take them."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._units: deque[Unit] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, units: Sequence[Unit]) -> None:
        """Adds units that became ready together."""
        with self._changed:
            self._units.extend(units)
            self._changed.notify(len(units))

    def take(self) -> list[Unit] | None:
        """Waits for units and returns a worker's share of those that one call can take: of one judgement and stage. ``None`` once the queue is closed."""
        with self._changed:
            while True:
                while self._units and self._units[0].judging.ended:
                    self._units.popleft()
                if self._is_closed or self._units:
                    break
                self._changed.wait()
            if self._is_closed:
                return None
            first = self._units[0]
            alike = [unit for unit in self._units if unit.judging is first.judging and unit.stage == first.stage]
            share = alike[: math.ceil(len(alike) / self._workers)]
            taken = set(map(id, share))
            self._units = deque(unit for unit in self._units if id(unit) not in taken)
            return share

    def close(self) -> None:
        """Ends every ``take``."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
