"""The spans of a request in the gateway: who asks, its turn, the choice of a backend, and each attempt."""

import time

from tandem.gateway.backend import Backend
from tandem.gateway.inference_request import InferenceRequest
from tandem.runtime.traces.spans import OpenSpan, Value, begin, note


class RequestTrace:
    """The parts of ``span``, which is that of the whole request: each begins where the one before has ended."""

    __slots__ = ("_since_ns", "span")

    def __init__(self, span: OpenSpan) -> None:
        self.span = span
        self._since_ns = time.time_ns()

    def part(self, name: str) -> None:
        """Records what has ended now as ``name``."""
        now = time.time_ns()
        note(name, self.span.context, self._since_ns, now)
        self._since_ns = now

    def read(self, request: InferenceRequest) -> None:
        """The body has been read: notes what is asked for, by OpenTelemetry's names."""
        self.part("read")
        self.span.update({"gen_ai.request.model": request.asked_model or "-", "gen_ai.request.max_tokens": request.max_tokens,
                          "gen_ai.request.stream": request.stream, "tandem.request_id": request.id})  # fmt: skip

    def attempt(self, backend: Backend, number: int) -> OpenSpan:
        """Begins an attempt at ``backend``, after ``number`` others."""
        attributes: dict[str, Value] = {"tandem.backend": backend.name, "server.address": backend.config.url, "http.request.resend_count": number}
        opened = begin("attempt", self.span.context, attributes, "client")
        assert opened is not None, "its trace is sampled"
        return opened
