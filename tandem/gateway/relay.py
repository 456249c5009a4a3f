"""The bytes of a backend's answer on their way to the client."""

import time

from tandem.gateway.attempt_failure import UpstreamFailed
from tandem.gateway.backend import Attempt
from tandem.gateway.exchange import Exchange
from tandem.gateway.headers import Headers
from tandem.gateway.named_events import NAMED_PATHS, is_ended
from tandem.gateway.server_sent_events import EventParts
from tandem.gateway.upstream_connection import UpstreamConnection

EVENTS = b"text/event-stream"
WHOLE_BYTES = 2**22
"""An answer that is not streamed is received up to this size before any of it is sent, so that one that breaks off can be repeated."""
_MOST_EVENT_BYTES = 2**24
"""Of one event: what is kept of a stream whose backend ends no line. A long prompt with its log-probabilities is one event."""
_ENDED_BY_DONE = ("/v1/completions", "/v1/chat/completions", "/generate")
"""Paths whose streams end with ``[DONE]``. A connection that closes without it was cut, even if HTTP calls that an end."""


async def relay(exchange: Exchange, attempt: Attempt, response: UpstreamConnection, headers: Headers) -> None:
    """Sends the answer ``response`` of ``attempt`` to the client, with ``headers``. Raises ``UpstreamFailed`` if it breaks off."""
    send = _stream if response.content_type == EVENTS else _whole
    await send(exchange, attempt, response, headers)


async def _whole(exchange: Exchange, attempt: Attempt, response: UpstreamConnection, headers: Headers) -> None:
    """Sends an answer that is no stream of events."""
    parts: list[bytes] = []
    size = 0
    while part := await response.read():
        attempt.answered(is_success=response.status < 400)
        attempt.waiting_since = None
        parts.append(part)
        size += len(part)
        if size > WHOLE_BYTES:
            await exchange.start(response.status, headers)
            await exchange.part(b"".join(parts))
            parts.clear()
        attempt.waiting_since = time.monotonic()
    body = b"".join(parts)
    if response.status < 400:
        if exchange.noted is not None:
            exchange.noted(body, attempt.backend)
        exchange.count_output(exchange.meter.whole(body))
    await exchange.start(response.status, headers)
    await exchange.part(body, is_last=True)


async def _stream(exchange: Exchange, attempt: Attempt, response: UpstreamConnection, headers: Headers) -> None:
    """Sends events as they come, each whole. Raises ``UpstreamFailed`` if the last one is missing."""
    exchange.is_stream = True
    is_named = exchange.request.path in NAMED_PATHS and attempt.backend.is_tandem
    is_done, parts = exchange.request.path not in _ENDED_BY_DONE and not is_named, EventParts()
    while part := await response.read():
        attempt.waiting_since = None
        whole = parts.add(part)
        if parts.size > _MOST_EVENT_BYTES:
            raise UpstreamFailed("an event of its stream has no end")
        if whole and not attempt.has_begun:
            attempt.answered()
            attempt.done(exchange.prompt_tokens)
            if exchange.noted is not None:
                exchange.noted(whole, attempt.backend)
            await exchange.start(response.status, headers)
        is_done = is_done or (is_named and is_ended(whole))
        if whole and exchange.repetition is not None:
            whole = exchange.repetition.rest(whole)
        if whole:
            if exchange.weights is not None:
                exchange.delivered.add(whole)
            count = exchange.meter.events(whole)
            attempt.done(count)
            exchange.count_output(count)
            is_done = is_done or whole.rstrip().endswith(b"[DONE]")
            await exchange.part(whole)
        attempt.waiting_since = time.monotonic()
    if parts.size or not is_done:
        raise UpstreamFailed("its answer is not complete")
    await exchange.start(response.status, headers)
    await exchange.part(b"", is_last=True)
