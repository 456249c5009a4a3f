"""Copies of requests for models that are tried in the shadow: their answers are read and discarded."""

import asyncio
import time

from tandem.gateway.attempt_failure import UpstreamFailed
from tandem.gateway.backend import Attempt, Backend
from tandem.gateway.breaker import Outcome
from tandem.gateway.inference_request import InferenceRequest
from tandem.gateway.metrics import Metrics
from tandem.gateway.pool import Pool
from tandem.gateway.upstream import Upstream
from tandem.runtime.process.tasks import end_tasks

_MOST = 256
"""Copies in flight; more are left out, as are those for backends without room: a shadow waits in no queue."""


class Shadows:
    """Sends copies, each in a task of its own, so that the client's answer waits for none of it."""

    def __init__(self, pool: Pool, upstream: Upstream, metrics: Metrics) -> None:
        self._pool, self._upstream, self._metrics = pool, upstream, metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, request: InferenceRequest) -> None:
        """Begins the copies of ``request``."""
        for copy in request.shadows:
            backend = self._pool.choose(copy)
            if backend is None or backend.room <= 0 or len(self._tasks) >= _MOST:
                self._count(copy, "left_out")
                continue
            task = asyncio.create_task(self._send(copy, backend), name=f"shadow {copy.id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends all copies."""
        await end_tasks(self._tasks)

    async def _send(self, copy: InferenceRequest, backend: Backend) -> None:
        if not backend.breaker.allows():
            self._count(copy, "left_out")
            return
        attempt = backend.take(copy.prompt_tokens + copy.max_tokens)
        outcome = Outcome.UNKNOWN
        try:
            outcome = await self._read(copy, backend, attempt)
        except asyncio.CancelledError:
            if attempt.given_up is None:
                raise
            outcome = Outcome.FAILURE
        except UpstreamFailed:
            outcome = Outcome.FAILURE
        finally:
            attempt.release()
            attempt.report(outcome)
            self._count(copy, outcome.value)

    async def _read(self, copy: InferenceRequest, backend: Backend, attempt: Attempt) -> Outcome:
        attempt.waiting_since = time.monotonic()
        async with self._upstream.post(backend, copy, copy.body) as response:
            while await response.read():
                attempt.has_begun = True
                attempt.waiting_since = time.monotonic()
        return Outcome.of_status(response.status)

    def _count(self, copy: InferenceRequest, outcome: str) -> None:
        self._metrics.shadows.labels(copy.model or "-", outcome).inc()
