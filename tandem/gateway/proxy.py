"""Answers a request through a backend: attempts, retries, and the way back to the client."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

import aiohttp
from starlette.types import Receive, Send
from yarl import URL

from tandem.config.gateway import GatewayConfig
from tandem.gateway.admission import Admission, Charge
from tandem.gateway.backend import Attempt, Backend
from tandem.gateway.breaker import Outcome
from tandem.gateway.headers import Headers, end_to_end, to_backend
from tandem.gateway.inference_request import InferenceRequest
from tandem.gateway.metrics import Metrics
from tandem.gateway.pool import Pool
from tandem.gateway.resume import RESUMABLE_PATHS, Delivered, Diverged, Repetition, seeded
from tandem.gateway.retry_budget import RetryBudget
from tandem.gateway.server_sent_events import whole_events
from tandem.gateway.usage import Meter
from tandem.serving.errors import ApiError

BUSY = (429, 503)
RETRIED = (429, 500, 502, 503, 504)
"""Statuses with which a request is given to another backend, where there is one."""
WHOLE_BYTES = 2**22
"""An answer that is not streamed is received up to this size before any of it is sent, so that one that breaks off can be repeated."""
_ENDED_BY_DONE = ("/v1/completions", "/v1/chat/completions", "/generate")
"""Paths whose streams end with ``[DONE]``. A connection that closes without it was cut, even if HTTP calls that an end."""
_DONE = b"data: [DONE]\n\n"


class BackendFailed(Exception):
    """An attempt that brought no answer. ``is_lost``: the connection could not be made or broke before anything came, so that the same backend may be
    tried again. ``is_paid``: the budget has been charged for a retry."""

    def __init__(self, message: str, *, is_lost: bool = False, is_paid: bool = False) -> None:
        super().__init__(message)
        self.is_lost, self.is_paid = is_lost, is_paid


class StatusRetried(BackendFailed):
    """An answer whose status is not passed on, as another backend may do better. ``outcome``: what it says about the backend."""

    def __init__(self, message: str, outcome: Outcome, *, is_paid: bool = True) -> None:
        super().__init__(message, is_paid=is_paid)
        self.outcome = outcome


@dataclass
class Exchange:
    """One request of a client from its beginning to the end of its answer. ``status``: what was sent, 499 before."""

    request: InferenceRequest
    send: Send
    meter: Meter
    headers: Headers
    """Sent with the answer of whatever backend."""
    charge: Charge | None = None
    prompt_tokens: int = 0
    """Tokens of the prompt that the backend of the attempt has to compute."""
    body: bytes = b""
    """What Tandem's servers are sent: the client's bytes, with a seed if the answer may have to be repeated."""
    weights: str | None = None
    """The version of the weights of the backend whose stream the client receives, if another one can go on with it."""
    delivered: Delivered = field(default_factory=Delivered)
    repetition: Repetition | None = None
    began: float = field(default_factory=time.monotonic)
    status: int = 499
    is_stream: bool = False
    """Events are being sent."""
    tried: list[Backend] = field(default_factory=list)
    blamed: list[Attempt] = field(default_factory=list)
    """Attempts that ended with status 500: whether the backends or the request is to blame, shows the next one."""

    @property
    def has_begun(self) -> bool:
        """Whether the client has received a byte, so that nothing can be repeated."""
        return self.status != 499


class Proxy:
    """Passes requests to the pool's backends, and their answers back as they come."""

    def __init__(
        self, config: GatewayConfig, pool: Pool, session: aiohttp.ClientSession, metrics: Metrics, admission: Admission, *, passes_keys: bool
    ) -> None:
        self._config, self._pool, self._session, self._metrics, self._admission = config, pool, session, metrics, admission
        self._budget = RetryBudget(config.retry)
        self._authorization = {
            backend.name: f"Bearer {backend.api_key}" if backend.api_key else None if passes_keys else "" for backend in pool.backends
        }

    async def answer(self, request: InferenceRequest, receive: Receive, send: Send, meter: Meter, headers: Headers) -> None:
        """Answers ``request``. ``receive`` has nothing but the client's end left. ``meter`` counts what it costs. ``headers`` are added to the answer's.
        Raises ``ApiError`` for what is answered with an error."""
        exchange = Exchange(request, send, meter, headers, body=self._body(request))
        task = asyncio.current_task()
        assert task is not None
        has_left = False

        async def watch() -> None:
            nonlocal has_left
            while (await receive())["type"] != "http.disconnect":
                pass
            has_left = True
            task.cancel()

        watcher = asyncio.create_task(watch())
        try:
            async with self._admission(request) as exchange.charge:
                await self._attempts(exchange)
        except asyncio.CancelledError:
            if not has_left:
                raise
            # The connection to the backend is closed by now: that is how it learns that nobody waits.
            task.uncancel()
            exchange.status = 499
        except ApiError as error:
            exchange.status = error.status
            raise
        finally:
            watcher.cancel()
            model = request.model or "-"
            self._metrics.requests.labels(model, exchange.status).inc()
            self._metrics.duration.labels(model).observe(time.monotonic() - exchange.began)

    async def _attempts(self, exchange: Exchange) -> None:
        """Makes attempts until one brings an answer. Raises ``ApiError`` if none does."""
        self._budget.request()
        model, failure = exchange.request.model, BackendFailed("no backend was tried")
        try:
            for number in range(self._config.retry.attempts):
                if number:
                    if not failure.is_paid and not self._budget.take():
                        break
                    self._metrics.retries.inc()
                    await asyncio.sleep(random.uniform(0, self._config.retry.backoff_s * 2**number))
                if exchange.has_begun:
                    backend = self._pool.choose_same(exchange.weights, model, exchange.tried)
                else:
                    backend = self._pool.choose(model, exchange.tried, exchange.request.prefix)
                    if backend is None and failure.is_lost:
                        backend = self._pool.choose(model)
                if backend is None:
                    break
                try:
                    await self._attempt(exchange, backend, is_last=number + 1 == self._config.retry.attempts)
                    return
                except BackendFailed as error:
                    failure = error
                    exchange.tried.append(backend)
        finally:
            self._settle(exchange, Outcome.FAILURE)
        if not exchange.tried:
            raise self._pool.refusal(model)
        if exchange.has_begun:
            await self._end_broken(exchange, str(failure))
            return
        raise ApiError(502, f"the backend failed: {failure}", kind="backend_error", code="backend_failed")

    def _settle(self, exchange: Exchange, outcome: Outcome) -> None:
        """Reports the attempts that ended with status 500."""
        for attempt in exchange.blamed:
            attempt.report(outcome)
        exchange.blamed.clear()

    async def _attempt(self, exchange: Exchange, backend: Backend, *, is_last: bool) -> None:
        """Makes one attempt. Raises ``BackendFailed`` if another one may be made."""
        request = exchange.request
        exchange.prompt_tokens = max(0, request.prompt_tokens - self._pool.send(request.prefix, backend))
        attempt = backend.take(exchange.prompt_tokens + request.max_tokens)
        outcome = Outcome.UNKNOWN
        try:
            attempt.waiting_since = asyncio.get_running_loop().time()
            body = exchange.body if backend.is_tandem else request.body
            async with self._session.post(
                self._url(backend, request), data=body, headers=self._headers(backend, request), allow_redirects=False
            ) as response:
                outcome = await self._relay(exchange, attempt, response, is_last=is_last)
        except StatusRetried as error:
            outcome = error.outcome
            raise
        except asyncio.CancelledError:
            if attempt.given_up is None:
                raise
            task = asyncio.current_task()
            if task is not None and task.uncancel() > 0:
                raise  # The client has left too.
            outcome = Outcome.FAILURE
            await self._broken(exchange, attempt.given_up)
        except Diverged as error:
            # It works, but it is not the same.
            await self._end_broken(exchange, str(error))
        except (aiohttp.ClientError, OSError) as error:
            outcome = Outcome.FAILURE
            is_lost = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
            await self._broken(exchange, _describe(error), is_lost=is_lost)
        finally:
            attempt.release()
            self._metrics.attempts.labels(backend.name, outcome.value).inc()
            if attempt not in exchange.blamed:
                attempt.report(outcome)

    async def _relay(self, exchange: Exchange, attempt: Attempt, response: aiohttp.ClientResponse, *, is_last: bool) -> Outcome:
        """Sends the answer of a backend to the client; returns what it says about the backend."""
        status, backend = response.status, attempt.backend
        if exchange.has_begun:
            return await self._go_on(exchange, attempt, response)
        outcome = Outcome.BUSY if status in BUSY else Outcome.FAILURE if status >= 500 else Outcome.SUCCESS
        has_other = status in RETRIED and not is_last and self._pool.choose(exchange.request.model, [*exchange.tried, backend]) is not None
        if has_other and self._budget.take():
            if status == 500:
                exchange.blamed.append(attempt)
            raise StatusRetried(f"it answers {status}", outcome)
        if status == 500 and exchange.blamed:
            # Two backends that both fail at one request are not broken: the request is to blame.
            self._settle(exchange, Outcome.UNKNOWN)
            outcome = Outcome.UNKNOWN
        else:
            self._settle(exchange, Outcome.FAILURE)
        headers = [(name, value) for name, value in end_to_end(response.raw_headers) if name != b"x-request-id"]
        headers += [(b"x-request-id", exchange.request.id.encode()), *exchange.headers]
        if response.content_type == "text/event-stream":
            if request_can_resume(exchange.request):
                exchange.weights = backend.weights
            await self._stream(exchange, attempt, response, headers)
        else:
            await self._whole(exchange, attempt, response, headers)
        return outcome

    async def _go_on(self, exchange: Exchange, attempt: Attempt, response: aiohttp.ClientResponse) -> Outcome:
        """Sends the rest of a stream that another backend has begun. Raises ``Diverged`` if this one's is not the same."""
        if response.status != 200 or response.content_type != "text/event-stream":
            raise StatusRetried(f"it answers {response.status}", Outcome.BUSY if response.status in BUSY else Outcome.FAILURE, is_paid=False)
        exchange.repetition = exchange.delivered.repetition()
        self._metrics.resumed.inc()
        await self._stream(exchange, attempt, response, [])
        return Outcome.SUCCESS

    async def _whole(self, exchange: Exchange, attempt: Attempt, response: aiohttp.ClientResponse, headers: Headers) -> None:
        """Sends an answer that is no stream of events."""
        parts: list[bytes] = []
        size = 0
        async for part in response.content.iter_any():
            attempt.has_begun = True
            attempt.waiting_since = None
            parts.append(part)
            size += len(part)
            if size > WHOLE_BYTES:
                await self._start(exchange, response.status, headers)
                await self._part(exchange, b"".join(parts))
                parts.clear()
            attempt.waiting_since = asyncio.get_running_loop().time()
        body = b"".join(parts)
        if response.status < 400:
            self._charge(exchange, exchange.meter.whole(body))
        await self._start(exchange, response.status, headers)
        await self._part(exchange, body, is_last=True)

    async def _stream(self, exchange: Exchange, attempt: Attempt, response: aiohttp.ClientResponse, headers: Headers) -> None:
        """Sends events as they come, each whole. Raises ``aiohttp.ClientPayloadError`` if the last one is missing."""
        loop = asyncio.get_running_loop()
        exchange.is_stream = True
        is_done, held = exchange.request.path not in _ENDED_BY_DONE, b""
        async for part in response.content.iter_any():
            attempt.waiting_since = None
            whole, held = whole_events(held + part)
            if whole and not attempt.has_begun:
                attempt.has_begun = True
                attempt.done(exchange.prompt_tokens)
                await self._start(exchange, response.status, headers)
            if whole and exchange.repetition is not None:
                whole = exchange.repetition.rest(whole)
            if whole:
                if exchange.weights is not None:
                    exchange.delivered.add(whole)
                count = exchange.meter.events(whole)
                attempt.done(count)
                self._charge(exchange, count)
                is_done = is_done or whole.rstrip().endswith(b"[DONE]")
                await self._part(exchange, whole)
            attempt.waiting_since = loop.time()
        if held or not is_done:
            raise aiohttp.ClientPayloadError("the stream ended before its last event")
        await self._start(exchange, response.status, headers)
        await self._part(exchange, b"", is_last=True)

    def _charge(self, exchange: Exchange, tokens: int) -> None:
        if exchange.charge is not None:
            exchange.charge.output(tokens)

    async def _start(self, exchange: Exchange, status: int, headers: Headers) -> None:
        if exchange.has_begun:
            return
        exchange.status = status
        self._metrics.first_byte.labels(exchange.request.model or "-").observe(time.monotonic() - exchange.began)
        await exchange.send({"type": "http.response.start", "status": status, "headers": headers})

    async def _part(self, exchange: Exchange, part: bytes, *, is_last: bool = False) -> None:
        await exchange.send({"type": "http.response.body", "body": part, "more_body": not is_last})

    async def _broken(self, exchange: Exchange, why: str, *, is_lost: bool = False) -> None:
        """Deals with an attempt that broke: raises ``BackendFailed`` if another one can take its place, else ends the answer."""
        can_go_on = exchange.is_stream and exchange.weights is not None and exchange.delivered.is_whole
        if not exchange.has_begun or can_go_on:
            raise BackendFailed(why, is_lost=is_lost)
        await self._end_broken(exchange, why)

    async def _end_broken(self, exchange: Exchange, why: str) -> None:
        """Ends an answer so that the client sees that it is not whole: with an event in a stream, else by closing the connection."""
        if exchange.is_stream:
            error = ApiError(502, f"the backend broke off: {why}", kind="backend_error", code="backend_failed")
            await self._part(exchange, b"data: " + json.dumps(error.body).encode() + b"\n\n" + _DONE, is_last=True)

    def _body(self, request: InferenceRequest) -> bytes:
        if not request_can_resume(request) or request.has_seed or not any(backend.is_tandem for backend in self._pool.backends):
            return request.body
        return seeded(request.body, random.getrandbits(62))

    def _headers(self, backend: Backend, request: InferenceRequest) -> list[tuple[str, str]]:
        headers = to_backend(request.headers, authorization=self._authorization[backend.name], client=request.client)
        plain = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers if name != b"x-request-id"]
        return [*plain, ("x-request-id", request.id)]

    def _url(self, backend: Backend, request: InferenceRequest) -> URL:
        query = f"?{request.query.decode('latin-1')}" if request.query else ""
        return URL(f"{backend.config.url.rstrip('/')}{request.path}{query}", encoded=True)


def request_can_resume(request: InferenceRequest) -> bool:
    """Returns whether the answer is a stream that can be put together from two backends."""
    return request.stream and request.path in RESUMABLE_PATHS


def _describe(error: Exception) -> str:
    """Returns an error of a connection without the address, which is the operator's business."""
    text = {
        aiohttp.ServerDisconnectedError: "it closed the connection",
        aiohttp.ClientPayloadError: "its answer is not complete",
        aiohttp.ClientConnectorError: "no connection",
        aiohttp.ServerTimeoutError: "no connection in time",
        aiohttp.ClientResponseError: "its answer is not HTTP",
    }
    return next((words for kind, words in text.items() if isinstance(error, kind)), type(error).__name__)
