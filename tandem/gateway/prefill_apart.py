"""Prompts that are computed at another Tandem server than the one that answers, where that pays: the answering server's streams do not wait for them.

The answer is the same either way, so whatever goes wrong with the prompt's server leads to an attempt without it.
"""

import asyncio
import json
import time
from collections.abc import Sequence

from tandem.config.routing import RouterConfig
from tandem.gateway.attempt_failure import UpstreamFailed
from tandem.gateway.backend import Attempt, Backend
from tandem.gateway.breaker import Outcome
from tandem.gateway.exchange import Exchange
from tandem.gateway.inference_request import InferenceRequest
from tandem.gateway.metrics import Metrics
from tandem.gateway.resume import REPEATABLE_PATHS
from tandem.gateway.upstream import Upstream
from tandem.gateway.upstream_connection import UpstreamConnection

_MOST_BYTES = 2**26
"""Of the answer that says where the blocks are: about 70 bytes for 16 tokens."""
_UNFIT = (b'"kv_transfer_params"', b'"prompt_logprobs"', b'"echo"')
"""Fields of requests that name blocks themselves, or that need the prompt's own logits, which no block has."""
_ASKED = b',"kv_transfer_params":{"do_remote_decode":true}}'


def pays(new_tokens: int, backend: Backend, prefill: Backend) -> bool:
    """Returns whether it is sooner done, for the request and the streams that ``backend`` has, to compute ``new_tokens`` of a prompt at ``prefill`` and move
    them than to compute them at ``backend``, where each stream waits for them too. Speeds are those that the servers have measured; one that is not known is
    taken from the other server, and if none is known, moving them pays as soon as a stream would wait."""
    here, there = backend.engine, prefill.engine
    if here is None or there is None:
        return False
    speeds = [state.prefill_tokens_per_s for state in (here, there)]
    here_s, there_s = (speed or max(speeds) for speed in speeds)
    waiting = len(backend.attempts)
    if not there_s:
        return waiting > 1
    moving_s = new_tokens / here.transfer_tokens_per_s if here.transfer_tokens_per_s else 0.0
    return (prefill.outstanding_tokens + new_tokens) / there_s + moving_s < new_tokens / here_s * max(1, waiting)


class PrefillApart:
    """Decides for each attempt, and asks the prompt's server. ``backends``: those of the gateway, in a list that others change."""

    def __init__(self, backends: Sequence[Backend], upstream: Upstream, metrics: Metrics) -> None:
        self._backends, self._upstream, self._metrics = backends, upstream, metrics

    async def body(self, exchange: Exchange, backend: Backend, settings: RouterConfig) -> bytes:
        """Returns what ``backend`` is sent for its attempt: the exchange's body, with the place of the prompt's KV blocks if they were computed elsewhere."""
        prefill = self._prefill(exchange, backend, settings)
        if prefill is None:
            return exchange.body
        params = await self._ask(exchange, prefill)
        self._metrics.prefills.labels("apart" if params else "failed").inc()
        return _with(exchange.body, b',"kv_transfer_params":%s}' % json.dumps(params, separators=(",", ":")).encode()) if params else exchange.body

    def _prefill(self, exchange: Exchange, backend: Backend, settings: RouterConfig) -> Backend | None:
        """Returns the server that is to compute the prompt, ``None`` if ``backend`` is."""
        request, state = exchange.request, backend.engine
        new_tokens = exchange.prompt_tokens
        if settings.prefill_apart == "never" or request.path not in REPEATABLE_PATHS or new_tokens < settings.prefill_apart_tokens:
            return None
        if state is None or not state.receives or any(field in request.body for field in _UNFIT):
            return None
        able = [each for each in self._backends if each is not backend and _can_prefill(each, request, backend)]
        if not able:
            return None
        chosen = min(able, key=lambda each: (each.load, each.last_taken))
        if settings.prefill_apart == "auto" and not pays(new_tokens, backend, chosen):
            self._metrics.prefills.labels("together").inc()
            return None
        return chosen

    async def _ask(self, exchange: Exchange, prefill: Backend) -> object:
        """Returns ``kv_transfer_params`` of the prompt; ``None`` if they could not be had."""
        request = exchange.request
        attempt = prefill.take(request.prompt_tokens, exchange.task)
        outcome, params = Outcome.UNKNOWN, None
        try:
            attempt.waiting_since = time.monotonic()
            async with self._upstream.post(prefill, request, _with(exchange.body, _ASKED)) as response:
                outcome = Outcome.of_status(response.status)
                params = await _read(response, attempt)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if attempt.given_up is None or (task is not None and task.uncancel() > 0):
                raise  # The client has left, or the answer's own attempt was given up.
            outcome = Outcome.FAILURE
        except UpstreamFailed:
            outcome = Outcome.FAILURE
        except (ValueError, TypeError, KeyError):
            params = None
        finally:
            attempt.release()
            attempt.report(outcome)
            self._metrics.attempts.labels(prefill.name, outcome.value).inc()
        return params


def _can_prefill(prefill: Backend, request: InferenceRequest, backend: Backend) -> bool:
    state = prefill.engine
    serves = request.model is None or request.model in prefill.models
    is_open = prefill.is_ready and prefill.room > 0 and serves and prefill.breaker.allows()
    return is_open and state is not None and prefill.role == "prefill" and state.sends and prefill.weights == backend.weights


def _with(body: bytes, fields: bytes) -> bytes:
    """Returns the JSON object ``body``, which has at least one field, with ``fields``."""
    return body.rstrip()[:-1] + fields


async def _read(response: UpstreamConnection, attempt: Attempt) -> object:
    """Raises ``ValueError``, ``TypeError`` or ``KeyError`` for an answer that has no place of blocks."""
    parts, size = list[bytes](), 0
    while part := await response.read():
        attempt.has_begun = True
        attempt.waiting_since = time.monotonic()
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            raise ValueError("the answer is too large")
    params = json.loads(b"".join(parts))["kv_transfer_params"] if response.status == 200 else None
    return params if isinstance(params, dict) else None
