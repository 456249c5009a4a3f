"""Ends the waits of attempts whose backend owes an answer for too long, and looks after those that wait for a backend."""

import asyncio
import time
from collections.abc import Callable

from tandem.config.gateway import TimeoutConfig
from tandem.gateway.backend import Backend

_PERIOD_S = 0.1


async def watch_waits(config: TimeoutConfig, backends: list[Backend], wake: Callable[[], None]) -> None:
    """Gives up, for ever, the attempts that wait longer than ``first_byte_s``, ``idle_s`` or their client, and calls ``wake`` for requests in the queue. One
    task looks at all of them: a timer for each part of each answer would cost more than passing the part on."""
    period = min(_PERIOD_S, config.first_byte_s / 2, config.idle_s / 2)
    while True:
        await asyncio.sleep(period)
        wake()
        now = time.monotonic()
        for backend in backends:
            for attempt in list(backend.attempts):
                since, limit = attempt.waiting_since, config.idle_s if attempt.has_begun else config.first_byte_s
                if attempt.deadline is not None and not attempt.has_begun and now > attempt.deadline:
                    attempt.give_up("it did not answer in the client's time", is_late=True)
                elif since is not None and now - since > limit:
                    attempt.give_up(f"it did not {'go on' if attempt.has_begun else 'answer'} within {limit:g} s")
