"""What a backend is sent: address, headers and body; and the connections that are kept for the next request."""

import asyncio
import functools
import random
import ssl
from collections.abc import Sequence
from typing import Any

from tandem.gateway.backend import Backend
from tandem.gateway.headers import to_backend
from tandem.gateway.inference_request import InferenceRequest
from tandem.gateway.named_events import NAMED_PATHS
from tandem.gateway.resume import REPEATABLE_PATHS, can_resume, seed_of, seeded
from tandem.gateway.upstream_connection import Address, UpstreamConnection, address_of, connect, quoted
from tandem.runtime.traces.context import current

KEEP_ALIVE_S = 4.0
"""How long an idle connection to a backend is kept: less than the 5 s of uvicorn, which most of them run, so that it is not closed just as
a request is sent."""


class Upstream:
    """Sends requests to backends. ``passes_keys``: a backend without a key of its own is sent the client's. ``connect_s``: how long a connection may take."""

    def __init__(self, backends: Sequence[Backend], *, passes_keys: bool, connect_s: float) -> None:
        self._backends, self.passes_keys, self.connect_s = backends, passes_keys, connect_s
        self._loop = asyncio.get_running_loop()
        self._idle: dict[tuple[str, ssl.SSLContext | bool], list[UpstreamConnection]] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self.busy = 0
        """Connections on which a request is being answered, or that are being made."""

    @property
    def idle(self) -> int:
        """Connections that are kept for the next request."""
        return sum(map(len, self._idle.values()))

    def post(self, backend: Backend, request: InferenceRequest, body: bytes, traceparent: str = "") -> "Posted":
        """Sends ``request`` to ``backend``. ``body``: sent instead of the client's bytes where the backend is Tandem's server. ``traceparent``: of the
        attempt, that of the request if it is empty; sent instead of the client's where requests are traced."""
        if not traceparent and (context := current()) is not None:
            traceparent = context.traceparent
        address = address_of(backend.config.url)
        content = body if backend.is_tandem else request.body
        return Posted(self, backend, address, self._head(backend, address, request, len(content), traceparent), content)

    def repeatable_body(self, request: InferenceRequest) -> bytes:
        """Returns the body of a request with a seed, if its answer may have to be repeated at another of Tandem's servers, else its body."""
        is_repeated = bool(request.idempotency_key) and request.path in (*REPEATABLE_PATHS, *NAMED_PATHS)
        if not (can_resume(request) or is_repeated) or request.has_seed or not any(backend.is_tandem for backend in self._backends):
            return request.body
        return seeded(request.body, seed_of(request.idempotency_key) if request.idempotency_key else random.getrandbits(62))

    def authorization(self, backend: Backend) -> str | None:
        """Returns what replaces the client's ``Authorization``, as of ``headers.to_backend``."""
        return f"Bearer {backend.api_key}" if backend.api_key else None if self.passes_keys else ""

    def close(self) -> None:
        """Closes the connections that have no request."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    async def take(self, backend: Backend, address: Address) -> UpstreamConnection:
        """Returns a connection to ``backend``, the one that was used last if one is open, for ``give_back``. Raises ``UpstreamFailed``."""
        idle, oldest = self._idle.get((backend.config.url, backend.tls)), self._loop.time() - KEEP_ALIVE_S
        while idle:
            connection = idle.pop()
            if connection.is_open and connection.idle_since > oldest:
                return connection
            connection.close()
        tls = None if not address.is_tls else backend.tls if isinstance(backend.tls, ssl.SSLContext) else _system_tls()
        return await connect(self._loop, address, tls, self.connect_s)

    def give_back(self, backend: Backend, connection: UpstreamConnection | None) -> None:
        """Ends a request: keeps its ``connection``, if there came to be one and it can be used again."""
        self.busy -= 1
        if connection is not None and connection.finish():
            self._idle.setdefault((backend.config.url, backend.tls), []).append(connection)
            if self._sweep is None:
                self._sweep = self._loop.call_later(KEEP_ALIVE_S, self._close_old)

    def _close_old(self) -> None:
        oldest = self._loop.time() - KEEP_ALIVE_S
        for key, connections in list(self._idle.items()):
            kept = [each for each in connections if each.is_open and each.idle_since > oldest]
            for each in connections:
                if each not in kept:
                    each.close()
            if kept:
                connections[:] = kept
            else:
                del self._idle[key]
        self._sweep = self._loop.call_later(KEEP_ALIVE_S / 2, self._close_old) if self._idle else None

    def _head(self, backend: Backend, address: Address, request: InferenceRequest, length: int, traceparent: str) -> bytes:
        """Returns the request's line and headers."""
        query = f"?{quoted(request.query.decode('latin-1'))}" if request.query else ""
        headers = to_backend(request.headers, authorization=self.authorization(backend), client=request.client)
        if traceparent:
            headers = [*(header for header in headers if header[0] != b"traceparent"), (b"traceparent", traceparent.encode())]
        lines = [
            f"POST {address.base}{request.path}{query} HTTP/1.1\r\nhost: {address.host_header}\r\ncontent-length: {length}\r\n"
            f"x-request-id: {request.id}\r\n".encode("latin-1"),
            *(b"%s: %s\r\n" % header for header in headers if header[0] != b"x-request-id"),
            b"\r\n",
        ]  # fmt: skip
        return b"".join(lines)


class Posted:
    """A request at a backend, as a context: it ends with its answer read, or with the connection closed."""

    __slots__ = ("_address", "_backend", "_body", "_connection", "_head", "_upstream")

    def __init__(self, upstream: Upstream, backend: Backend, address: Address, head: bytes, body: bytes) -> None:
        self._upstream, self._backend, self._address, self._head, self._body = upstream, backend, address, head, body
        self._connection: UpstreamConnection | None = None

    async def __aenter__(self) -> UpstreamConnection:
        """Waits for the beginning of the answer. Raises ``UpstreamFailed``."""
        self._upstream.busy += 1
        try:
            connection = self._connection = await self._upstream.take(self._backend, self._address)
            await connection.ask(self._head, self._body)
        except BaseException:
            self._upstream.give_back(self._backend, self._connection)
            raise
        return connection

    async def __aexit__(self, *_: Any) -> None:
        self._upstream.give_back(self._backend, self._connection)


@functools.cache
def _system_tls() -> ssl.SSLContext:
    return ssl.create_default_context()
