"""When a request gets a second attempt, and which of the two answers it (Dean and Barroso, "The Tail at Scale", CACM 2013, hedged requests)."""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace

from starlette.types import Message

from tandem.config.gateway import RetryConfig
from tandem.config.hedge import HedgeConfig
from tandem.gateway.attempt_failure import BackendFailed
from tandem.gateway.backend import Backend
from tandem.gateway.exchange import Exchange
from tandem.gateway.inference_request import InferenceRequest
from tandem.gateway.retry_budget import RetryBudget
from tandem.runtime.process.tasks import end_tasks

_SHARE = 0.95
_KEPT, _FEWEST = 200, 20
"""Times that are kept of each model, and with fewer of which nothing is known of its tail."""
_MOST_MODELS = 1000


class Hedges:
    """The times of requests that may be asked for twice, and how many second attempts they may have."""

    def __init__(self, config: HedgeConfig) -> None:
        self._config = config
        # A reserve of 0: no more than the share is ever made.
        self._budget = RetryBudget(RetryConfig(budget=config.share, reserve=0))
        self._times: dict[str | None, deque[float]] = {}

    def delay_s(self, request: InferenceRequest, backend: Backend) -> float | None:
        """Counts ``request``, whose first attempt is made at ``backend``; returns how long it waits for its answer until the second one is made, ``None`` if
        there is none."""
        config = self._config
        if not config.share or request.stream or request.most_tokens is None or request.most_tokens > config.max_tokens:
            return None
        if not (request.is_deterministic or (request.idempotency_key and backend.is_tandem)):
            return None
        self._budget.request()
        if config.after_s:
            return config.after_s
        times = sorted(self._times.get(request.model, ()))
        return times[math.ceil(_SHARE * len(times)) - 1] if len(times) >= _FEWEST else math.inf

    def note(self, model: str | None, seconds: float) -> None:
        """Notes how long such a request for ``model`` took to be answered."""
        if model not in self._times and len(self._times) >= _MOST_MODELS:
            self._times.clear()
        self._times.setdefault(model, deque(maxlen=_KEPT)).append(seconds)

    def take(self) -> bool:
        """Returns whether a second attempt may be made, and counts it."""
        return self._budget.take()


class Race:
    """The attempts of one request of which the first answer is the client's. ``attempt``: makes one; raises ``BackendFailed`` if it brings none."""

    def __init__(self, exchange: Exchange, attempt: Callable[[Exchange, Backend], Awaitable[None]]) -> None:
        self._exchange, self._attempt = exchange, attempt
        self._running: dict[asyncio.Task[None], Backend] = {}
        self._winner: asyncio.Task[None] | None = None
        self._last: Message | None = None

    @property
    def is_open(self) -> bool:
        """Whether no answer has begun."""
        return self._winner is None

    def start(self, backend: Backend) -> None:
        """Begins an attempt at ``backend``."""
        # What an attempt counts is its own until it has won, so that the request is billed once.
        own = replace(self._exchange, send=self._send, meter=replace(self._exchange.meter))

        async def run() -> None:
            try:
                await self._attempt(own, backend)
            finally:
                if self._winner is asyncio.current_task():
                    vars(self._exchange.meter).update(vars(own.meter))

        self._running[asyncio.create_task(run(), name=f"attempt {self._exchange.request.id}")] = backend

    async def wait(self, seconds: float | None = None) -> Backend | None:
        """Waits until the request is answered, at most ``seconds``; returns the backend whose answer it is, ``None`` while there is none. Raises the last
        attempt's ``BackendFailed`` if all have failed."""
        loop = asyncio.get_running_loop()
        ends = math.inf if seconds is None else loop.time() + seconds
        while self._running:
            left = None if math.isinf(ends) else max(0.0, ends - loop.time())
            done, _ = await asyncio.wait(self._running, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return None
            for task in done:
                backend = self._running.pop(task)
                try:
                    task.result()
                except BackendFailed:
                    self._exchange.tried.append(backend)
                    if not self._running:
                        raise
                except asyncio.CancelledError:
                    continue
                else:
                    return backend
        return None

    async def end(self) -> None:
        """Cancels the attempts that still run, and waits until they have ended."""
        await end_tasks(self._running)

    async def finish(self) -> None:
        """Sends the end of the answer. After it the client may leave, which ends the caller's task: it has nothing left to do then."""
        if self._last is not None:
            await self._exchange.send(self._last)

    async def _send(self, message: Message) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._winner is None:
            self._winner = task
            for other in self._running:
                if other is not task:
                    other.cancel()
        if message["type"] == "http.response.start":
            self._exchange.status = message["status"]
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._last = message
        else:
            await self._exchange.send(message)
