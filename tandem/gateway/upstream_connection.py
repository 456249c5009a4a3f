"""A connection to a backend: one request at a time, and its answer as it comes.

aiohttp's client costs more CPU time than all the rest of the gateway: for each request it builds a URL, cookies, a response with its reader, and several
tasks' worth of bookkeeping that a proxy has no use for.
"""

import asyncio
import functools
import ipaddress
import math
import socket
import ssl
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

import aiohappyeyeballs

from tandem.gateway.attempt_failure import UpstreamFailed
from tandem.gateway.headers import Headers
from tandem.gateway.response_parser import NotHttp, ResponseParser

_MOST_HELD_BYTES = 2**18
"""Of an answer that is not passed on yet; then the backend has to wait."""
_ONE_WRITE_BYTES = 2**16
"""A request up to this size is one write."""
_NEXT_ADDRESS_S = 0.25
"""After which a host's next address is tried beside one that does not answer (RFC 8305)."""
_TICK_S = 0.1
_VISIBLE = "".join(map(chr, range(0x21, 0x7F)))


@dataclass(frozen=True, slots=True)
class Address:
    """Where a backend is. ``base``: the beginning of all its paths. ``host_header``: as in requests."""

    host: str
    port: int
    is_tls: bool
    base: str
    host_header: str


@functools.lru_cache(maxsize=4096)
def address_of(url: str) -> Address:
    """Returns the address in a backend's ``url``."""
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    host, default = parts.hostname or "", 443 if is_tls else 80
    port = parts.port or default
    name = f"[{host}]" if ":" in host else host.encode("idna").decode() if not host.isascii() else host
    return Address(host, port, is_tls, quoted(parts.path.rstrip("/")), name if port == default else f"{name}:{port}")


def quoted(text: str) -> str:
    """Returns a part of a URL with everything escaped that is no visible ASCII character."""
    return text if text.isascii() and text.isprintable() and " " not in text else quote(text, safe=_VISIBLE, encoding="latin-1", errors="replace")


class UpstreamConnection(asyncio.Protocol):
    """A connection to a backend. ``idle_since``: event-loop time since when it has no request."""

    __slots__ = ("_error", "_held", "_is_paused", "_loop", "_parser", "_parts", "_transport", "_waiter", "idle_since")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: ResponseParser | None = None
        self._parts: list[bytes] = []
        self._held = 0
        self._is_paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._error: UpstreamFailed | None = None
        self.idle_since = 0.0

    @property
    def is_open(self) -> bool:
        return self._error is None and self._transport is not None and not self._transport.is_closing()

    @property
    def status(self) -> int:
        return 0 if self._parser is None else self._parser.status

    @property
    def headers(self) -> Headers:
        """Of the answer, with names in lower case."""
        return [] if self._parser is None else self._parser.headers

    @property
    def content_type(self) -> bytes:
        """Of the answer, without parameters, in lower case; empty if it says none."""
        given = next((value for name, value in self.headers if name == b"content-type"), b"")
        return given.partition(b";")[0].strip().lower()

    async def ask(self, head: bytes, body: bytes) -> None:
        """Sends a request and waits for the head of its answer. Raises ``UpstreamFailed``."""
        assert self._transport is not None
        self._parser = parser = ResponseParser()
        if len(body) <= _ONE_WRITE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        while not parser.status:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def read(self) -> bytes:
        """Returns what has come of the answer's body since the last call, at least a byte; nothing at its end. Raises ``UpstreamFailed``."""
        parser = self._parser
        assert parser is not None
        while not self._parts:
            if parser.is_complete:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait()
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._held = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def finish(self) -> bool:
        """Ends the request; returns whether the connection can have another one. It is closed if not, which ends the work of a backend that has not
        answered."""
        parser, transport = self._parser, self._transport
        self._parser = None
        if parser is None or not parser.is_complete or not parser.keeps_alive or self._parts or not self.is_open or self._is_unsent:
            self.close()
            return False
        assert transport is not None
        self.idle_since = self._loop.time()
        return True

    def close(self) -> None:
        transport, self._parser = self._transport, None
        self._parts.clear()
        if transport is not None and not transport.is_closing():
            # What the backend does not read must not keep the connection open.
            transport.abort() if self._is_unsent else transport.close()

    @property
    def _is_unsent(self) -> bool:
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if parser is None or parser.is_complete or self._error is not None:
            # Nobody has asked.
            self._fail("it closed the connection")
            self.close()
            return
        try:
            part = parser.feed(data)
        except NotHttp:
            self._fail("its answer is not HTTP", is_lost=False)
            assert self._transport is not None
            self._transport.close()
            return
        if part:
            self._parts.append(part)
            self._held += len(part)
            if self._held > _MOST_HELD_BYTES and not self._is_paused and not parser.is_complete and self._transport is not None:
                self._is_paused = True
                self._transport.pause_reading()
        if part or parser.status:
            self._wake()

    def eof_received(self) -> bool:
        self._ended()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._ended()

    def _ended(self) -> None:
        parser = self._parser
        if parser is None or not parser.end():
            has_begun = parser is not None and parser.status > 0
            self._fail("its answer is not complete" if has_begun else "it closed the connection", is_lost=not has_begun)
        self._wake()

    def _fail(self, why: str, *, is_lost: bool = True) -> None:
        self._error = self._error or UpstreamFailed(why, is_lost=is_lost)
        self._wake()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def connect(loop: asyncio.AbstractEventLoop, address: Address, tls: ssl.SSLContext | None, limit_s: float) -> UpstreamConnection:
    """Returns a new connection to ``address``. Raises ``UpstreamFailed``, also when it takes longer than ``limit_s``.

    Time in which the event loop was busy does not count: when thousands of requests come at once, the backends have accepted long before the gateway looks,
    and none of them has failed. So the limit is a number of ticks, each of which counts as one, however late it comes."""
    making, is_taken = loop.create_task(_make(loop, address, tls)), False
    try:
        for _ in range(math.ceil(limit_s / _TICK_S)):
            done, _ = await asyncio.wait((making,), timeout=min(limit_s, _TICK_S))
            if done:
                is_taken = True
                return making.result()
        raise UpstreamFailed("no connection in time")
    except OSError:
        raise UpstreamFailed("no connection", is_lost=True) from None
    finally:
        if not is_taken:
            making.cancel()
            making.add_done_callback(_discard)


async def _make(loop: asyncio.AbstractEventLoop, address: Address, tls: ssl.SSLContext | None) -> UpstreamConnection:
    """Returns a new connection. Raises ``OSError``."""
    try:
        ipaddress.ip_address(address.host)
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except ValueError:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    stream = await aiohappyeyeballs.start_connection(found, happy_eyeballs_delay=_NEXT_ADDRESS_S, loop=loop)
    try:
        if stream.family in (socket.AF_INET, socket.AF_INET6):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _, connection = await loop.create_connection(
            lambda: UpstreamConnection(loop), sock=stream, ssl=tls, server_hostname=address.host if tls is not None else None
        )
    except BaseException:
        stream.close()
        raise
    return connection


def _discard(making: "asyncio.Task[UpstreamConnection]") -> None:
    """Closes a connection that was made after its caller had left."""
    if not making.cancelled() and making.exception() is None:
        making.result().close()
