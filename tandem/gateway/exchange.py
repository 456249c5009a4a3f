"""One request of a client from its beginning to the end of its answer."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Send

from tandem.gateway.admission import Charge
from tandem.gateway.backend import Attempt, Backend
from tandem.gateway.headers import Headers
from tandem.gateway.inference_request import InferenceRequest
from tandem.gateway.metrics import Metrics
from tandem.gateway.named_events import NAMED_PATHS, NamedRepetition
from tandem.gateway.resume import Delivered, Repetition
from tandem.gateway.traced import RequestTrace
from tandem.gateway.usage import Meter
from tandem.serving.errors import ApiError, anthropic_error, is_anthropic

CLIENT_LEFT = 499
"""Counted as the status of an answer whose client has left; none is ever sent with it."""
_DONE = b"data: [DONE]\n\n"


@dataclass
class Exchange:
    """A request, what its attempts have come to, and the way to its client."""

    request: InferenceRequest
    send: Send
    meter: Meter
    metrics: Metrics
    headers: Headers
    """Sent with the answer of whatever backend."""
    body: bytes
    """What Tandem's servers are sent: the client's bytes, with a seed if the answer may have to be repeated."""
    noted: Callable[[bytes, Backend], None] | None = None
    """Called with the beginning of an answer and the backend that gives it."""
    task: "asyncio.Task[Any] | None" = None
    """That which answers it."""
    charge: Charge | None = None
    prompt_tokens: int = 0
    """Tokens of the prompt that the backend of the attempt has to compute."""
    weights: str | None = None
    """The version of the weights of the backend whose stream the client receives, if another one can go on with it."""
    delivered: Delivered = field(default_factory=Delivered)
    repetition: Repetition | NamedRepetition | None = None
    began: float = field(default_factory=time.monotonic)
    status: int = CLIENT_LEFT
    is_stream: bool = False
    """Events are being sent."""
    traced: RequestTrace | None = None
    """Its spans, if its trace is sampled."""
    tried: list[Backend] = field(default_factory=list)
    blamed: list[Attempt] = field(default_factory=list)
    """Attempts that ended with status 500: whether the backends or the request is to blame, shows the next one."""

    @property
    def has_begun(self) -> bool:
        """Whether the client has received a byte, so that nothing can be repeated."""
        return self.status != CLIENT_LEFT

    @property
    def can_go_on(self) -> bool:
        """Whether another backend can go on with the stream that the client receives."""
        return self.is_stream and self.weights is not None and (self.delivered.is_whole or self.repetition is not None)

    @property
    def needed_weights(self) -> str | None:
        """The version of the weights that the next backend must have, because the client has a part of the stream; ``None`` if it has none."""
        if self.has_begun:
            return self.weights
        return self.repetition.weights if self.repetition is not None and self.request.last_event_id else None

    def begin_stream(self, weights: str | None) -> None:
        """Notes the version of the weights with which the stream begins. ``None``: the backend promises no same tokens, so that its events have no ids."""
        self.weights = weights
        if weights is None:
            self.repetition = None
        elif self.repetition is not None:
            self.repetition.begin(weights)

    async def start(self, status: int, headers: Headers) -> None:
        """Sends status and headers, once."""
        if self.has_begun:
            return
        self.status = status
        self.metrics.first_byte.labels(self.request.model or "-").observe(time.monotonic() - self.began)
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def part(self, part: bytes, *, is_last: bool = False) -> None:
        """Sends bytes of the answer."""
        await self.send({"type": "http.response.body", "body": part, "more_body": not is_last})

    async def end_broken(self, why: str) -> None:
        """Ends an answer so that the client sees that it is not whole: with an event in a stream, else by closing the connection."""
        if self.is_stream:
            error = ApiError(502, f"the backend broke off: {why}", kind="backend_error", code="backend_failed")
            await self.part(self._last_event(error), is_last=True)

    def _last_event(self, error: ApiError) -> bytes:
        """Returns ``error`` as an event of the request's kind of stream."""
        if self.request.path not in NAMED_PATHS:
            return b"data: " + json.dumps(error.body).encode() + b"\n\n" + _DONE
        about = {"type": "error", "message": error.message, "code": error.code, "param": None}
        body = anthropic_error(error, self.request.id) if is_anthropic(self.request.path) else about
        return b"event: error\ndata: " + json.dumps(body).encode() + b"\n\n"

    def count_output(self, tokens: int) -> None:
        """Counts generated tokens as service of the request's tenant."""
        if self.charge is not None:
            self.charge.output(tokens)
