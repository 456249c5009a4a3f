"""Answers a request through a backend: attempts, and what follows from each."""

import asyncio
import functools
import random
import time

from starlette.types import Send

from tandem.config.gateway import GatewayConfig
from tandem.gateway.admission import Admission
from tandem.gateway.attempt_failure import BackendFailed, StatusRetried, UpstreamFailed
from tandem.gateway.backend import Attempt, Backend
from tandem.gateway.breaker import Outcome
from tandem.gateway.client_watch import WhileClientWaits
from tandem.gateway.exchange import CLIENT_LEFT, Exchange
from tandem.gateway.headers import Headers, end_to_end
from tandem.gateway.hedging import Hedges, Race
from tandem.gateway.inference_request import InferenceRequest
from tandem.gateway.metrics import Metrics
from tandem.gateway.named_events import NAMED_PATHS
from tandem.gateway.pool import Pool
from tandem.gateway.prefill_apart import PrefillApart
from tandem.gateway.relay import EVENTS, relay
from tandem.gateway.resume import can_resume, repetition_of
from tandem.gateway.retry_budget import RetryBudget
from tandem.gateway.shadow import Shadows
from tandem.gateway.stored_responses import PATH, StoredResponses
from tandem.gateway.stream_events import Diverged
from tandem.gateway.traced import RequestTrace
from tandem.gateway.upstream import Upstream
from tandem.gateway.upstream_connection import UpstreamConnection
from tandem.gateway.usage import Meter
from tandem.runtime.rpc.patient_protocol import Patience
from tandem.runtime.traces.spans import OpenSpan
from tandem.serving.errors import ApiError, id_headers

RETRIED = (429, 500, 502, 503, 504)
"""Statuses with which a request is given to another backend, where there is one."""


class Proxy:
    """Passes requests to the pool's backends, and their answers back as they come."""

    def __init__(
        self, config: GatewayConfig, pool: Pool, upstream: Upstream, metrics: Metrics, admission: Admission, shadows: Shadows, stored: StoredResponses
    ) -> None:
        self._config, self._pool, self._upstream, self._metrics, self._admission, self._shadows = config, pool, upstream, metrics, admission, shadows
        self._budget = RetryBudget(config.retry)
        self.stored = stored
        self._hedges = Hedges(config.hedge)
        self._apart = PrefillApart(pool.backends, upstream, metrics)

    def follow(self, config: GatewayConfig) -> None:
        """Takes other settings."""
        if config.retry != self._config.retry:
            self._budget = RetryBudget(config.retry)
        if config.hedge != self._config.hedge:
            self._hedges = Hedges(config.hedge)
        self._config = config

    async def answer(
        self, request: InferenceRequest, connection: Patience, send: Send, meter: Meter, headers: Headers, span: OpenSpan | None = None
    ) -> None:
        """Answers ``request``. ``connection``: the client's. ``meter`` counts what it costs. ``headers`` are added to the answer's. ``span``: of the request.
        Raises ``ApiError`` for what is answered with an error."""
        body, repetition = self._upstream.repeatable_body(request), repetition_of(request)
        exchange = Exchange(request, send, meter, self._metrics, headers, body, repetition=repetition)
        if span is not None:
            exchange.traced = RequestTrace(span)
        if request.path == PATH:
            exchange.noted = functools.partial(self.stored.note, request.tenant)
        try:
            with WhileClientWaits(connection) as client:
                exchange.task = client.task
                async with self._admission(request) as exchange.charge:
                    self._metrics.queue_wait.labels(request.model or "-").observe(time.monotonic() - exchange.began)
                    if exchange.traced is not None:
                        exchange.traced.part("queue")
                    self._shadows.start(request)
                    await self._attempts(exchange)
            if client.has_left:
                # The connection to the backend is closed by now: that is how it learns that nobody waits.
                exchange.status = CLIENT_LEFT
        except ApiError as error:
            exchange.status = error.status
            if error.code in ("queue_full", "deadline_exceeded"):
                self._metrics.refused.labels(error.code).inc()
            raise
        finally:
            model = request.model or "-"
            self._metrics.requests.labels(model, exchange.status).inc()
            self._metrics.duration.labels(model).observe(time.monotonic() - exchange.began)

    async def _attempts(self, exchange: Exchange) -> None:
        """Makes attempts until one brings an answer. Raises ``ApiError`` if none does."""
        self._budget.request()
        failure = BackendFailed("no backend was tried")
        try:
            for number in range(self._config.retry.attempts):
                if number:
                    if not failure.is_paid and not self._budget.take():
                        break
                    self._metrics.retries.inc()
                    await asyncio.sleep(random.uniform(0, self._config.retry.backoff_s * 2**number))
                backend = self._next_backend(exchange, failure)
                if exchange.traced is not None:
                    exchange.traced.part("route")
                if backend is None:
                    break
                try:
                    is_last = number + 1 == self._config.retry.attempts
                    delay_s = None if number else self._hedges.delay_s(exchange.request, backend)
                    if delay_s is None:
                        await self._attempt(exchange, backend, is_last=is_last)
                    else:
                        await self._hedged(exchange, backend, delay_s, is_last=is_last)
                    return
                except BackendFailed as error:
                    failure = error
                    exchange.tried += [backend] if backend not in exchange.tried else []
        finally:
            _settle_blamed(exchange, Outcome.FAILURE)
        if not exchange.tried:
            raise _cannot_go_on() if exchange.request.last_event_id else self._pool.refusal(exchange.request.model)
        if exchange.has_begun:
            await exchange.end_broken(str(failure))
            return
        raise ApiError(502, f"the backend failed: {failure}", kind="backend_error", code="backend_failed")

    async def _hedged(self, exchange: Exchange, backend: Backend, delay_s: float, *, is_last: bool) -> None:
        """Makes an attempt at ``backend``, and one at another if there is no answer after ``delay_s``; the first answer is the client's. Raises
        ``BackendFailed`` if none brings one."""
        began, request = time.monotonic(), exchange.request
        race = Race(exchange, functools.partial(self._attempt, is_last=is_last))
        race.start(backend)
        try:
            answering, other = await race.wait(delay_s), None
            if answering is None and race.is_open:
                # The answer is the same only where the weights are.
                different = [each for each in self._pool.backends if each is backend or each.weights != backend.weights]
                other = self._pool.choose(request, different)
                if other is not None and other.room > 0 and self._hedges.take():
                    race.start(other)
                else:
                    other = None
            answering = answering or await race.wait()
            if other is not None:
                self._metrics.hedges.labels("won" if answering is other else "lost").inc()
            if exchange.status == 200:
                self._hedges.note(request.model, time.monotonic() - began)
        finally:
            await race.end()
        await race.finish()

    def _next_backend(self, exchange: Exchange, failure: BackendFailed) -> Backend | None:
        """Returns the backend of the next attempt, after the last one's ``failure``; ``None`` if none can take it."""
        weights = exchange.needed_weights
        backend = self._pool.choose(exchange.request, exchange.tried, weights)
        if backend is not None:
            return backend
        may_repeat = failure.is_lost and not exchange.has_begun
        # Another of the servers at the same address may answer.
        return self._pool.choose(exchange.request, [each for each in exchange.tried if not (may_repeat or each.config.replicated)], weights)

    async def _attempt(self, exchange: Exchange, backend: Backend, *, is_last: bool) -> None:
        """Makes one attempt. Raises ``BackendFailed`` if another one may be made."""
        request = exchange.request
        exchange.prompt_tokens = max(0, request.prompt_tokens - self._pool.sent(request, backend))
        attempt = backend.take(exchange.prompt_tokens + request.max_tokens, exchange.task)
        outcome = Outcome.UNKNOWN
        traced = None if exchange.traced is None else exchange.traced.attempt(backend, len(exchange.tried))
        try:
            attempt.waiting_since = time.monotonic()
            if request.timeout_s is not None:
                attempt.deadline = attempt.waiting_since + request.timeout_s - (time.monotonic() - exchange.began)
            body = await self._apart.body(exchange, backend, self._config.router)
            async with self._upstream.post(backend, request, body, "" if traced is None else traced.context.traceparent) as response:
                if traced is not None:
                    traced.update({"http.response.status_code": response.status})
                    traced.event("first byte")
                outcome = await self._answered(exchange, attempt, response, is_last=is_last)
        except StatusRetried as error:
            outcome = error.outcome
            raise
        except asyncio.CancelledError:
            if attempt.given_up is None:
                raise
            task = asyncio.current_task()
            if task is not None and task.uncancel() > 0:
                raise  # The client has left too.
            if attempt.is_late:
                raise _too_late(request) from None
            outcome = Outcome.FAILURE
            await _broken(exchange, BackendFailed(attempt.given_up))
        except Diverged as error:
            # It works, but it is not the same.
            await exchange.end_broken(str(error))
        except UpstreamFailed as error:
            outcome = Outcome.FAILURE
            await _broken(exchange, error)
        finally:
            attempt.release()
            if traced is not None:
                traced.update({"tandem.outcome": outcome.value})
                traced.error = "" if outcome is not Outcome.FAILURE else "the backend failed"
                traced.end()
            self._metrics.attempts.labels(backend.name, outcome.value).inc()
            if attempt not in exchange.blamed:
                attempt.report(outcome)

    async def _answered(self, exchange: Exchange, attempt: Attempt, response: UpstreamConnection, *, is_last: bool) -> Outcome:
        """Sends the answer of a backend to the client; returns what it says about the backend. Raises ``StatusRetried`` instead if another backend may do
        better."""
        status, backend = response.status, attempt.backend
        if exchange.has_begun:
            await self._go_on(exchange, attempt, response)
            return Outcome.SUCCESS
        outcome = Outcome.of_status(status)
        has_other = status in RETRIED and not is_last and self._pool.has_other(exchange.request, [*exchange.tried, backend])
        if has_other and self._budget.take():
            if status == 500:
                exchange.blamed.append(attempt)
            raise StatusRetried(f"it answers {status}", outcome)
        if status == 500 and exchange.blamed:
            # Two backends that both fail at one request are not broken: the request is to blame.
            outcome = Outcome.UNKNOWN
        _settle_blamed(exchange, Outcome.UNKNOWN if outcome is Outcome.UNKNOWN else Outcome.FAILURE)
        if response.content_type == EVENTS and can_resume(exchange.request):
            exchange.begin_stream(backend.weights)
        headers = [(name, value) for name, value in end_to_end(response.headers) if name not in (b"x-request-id", b"request-id")]
        if exchange.request.idempotency_key:
            headers.append((b"x-tandem-repeatable", b"true" if backend.is_tandem else b"false"))
        await relay(exchange, attempt, response, [*headers, *id_headers(exchange.request.path, exchange.request.id), *exchange.headers])
        return outcome

    async def _go_on(self, exchange: Exchange, attempt: Attempt, response: UpstreamConnection) -> None:
        """Sends the rest of a stream that another backend has begun. Raises ``Diverged`` if this one's is not the same."""
        if response.status != 200 or response.content_type != EVENTS:
            said = Outcome.of_status(response.status)
            raise StatusRetried(f"it answers {response.status}", Outcome.FAILURE if said is Outcome.SUCCESS else said, is_paid=False)
        if exchange.repetition is not None:
            exchange.repetition = exchange.repetition.again()
        else:
            is_named = exchange.request.path in NAMED_PATHS
            exchange.repetition = exchange.delivered.named_repetition() if is_named else exchange.delivered.repetition()
        self._metrics.resumed.inc()
        await relay(exchange, attempt, response, [])


def _cannot_go_on() -> ApiError:
    return ApiError(409, "no backend can go on with the stream of Last-Event-ID: that takes a Tandem server with the same weights; leave the header out to "
                    "begin anew", kind="conflict_error", code="cannot_resume")  # fmt: skip


def _too_late(request: InferenceRequest) -> ApiError:
    message = f"the answer has not begun within X-Request-Timeout ({request.timeout_s:g} s)"
    return ApiError(504, message, kind="timeout_error", code="deadline_exceeded")


async def _broken(exchange: Exchange, failure: BackendFailed) -> None:
    """Deals with an attempt that broke: raises its ``failure`` if another one can take its place, else ends the answer."""
    if not exchange.has_begun or exchange.can_go_on:
        raise failure
    await exchange.end_broken(str(failure))


def _settle_blamed(exchange: Exchange, outcome: Outcome) -> None:
    """Reports the attempts that ended with status 500."""
    for attempt in exchange.blamed:
        attempt.report(outcome)
    exchange.blamed.clear()
