"""How many retries all requests together may make."""

import time
from collections.abc import Callable

from tandem.config.gateway import RetryConfig

_REFILL_S = 10.0


class RetryBudget:
    """A bucket into which each request puts a part of a retry, and from which each retry takes one: retries stay a fixed share of requests, so that they
    cannot multiply the load of backends that fail because of it. The reserve refills within ten seconds, for gateways with few requests."""

    def __init__(self, config: RetryConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._most, self._clock = config.budget, float(config.reserve), clock
        self._held, self._at = self._most, clock()

    def request(self) -> None:
        """Counts a request."""
        self._held = min(max(self._most, 1.0), self._held + self._share)

    def take(self) -> bool:
        """Returns whether a retry may be made, and counts it."""
        now = self._clock()
        if self._held < self._most:
            self._held = min(self._most, self._held + (now - self._at) * self._most / _REFILL_S)
        self._at = now
        if self._held < 1:
            return False
        self._held -= 1
        return True
