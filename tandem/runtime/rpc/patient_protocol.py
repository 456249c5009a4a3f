"""uvicorn's HTTP/1.1 with deadlines of its own for slow clients, and no request whose end could be read in two ways. Needs the extra ``serve``."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tandem.runtime.rpc.client_connections import ClientConnections
from tandem.runtime.rpc.strict_connection import StrictConnection

CONNECTION = "tandem.connection"
"""The key of ``scope["state"]`` under which the application finds the protocol of the request's connection."""
_REFUSED_S = 1.0
"""How long a refused connection may take to send the request that is answered with the refusal."""


if TYPE_CHECKING:
    _Http = H11Protocol
else:
    _Http = object


class Patience(_Http):
    """What is added to a protocol of uvicorn: it closes a connection if a request's head does not arrive within ``request_s``, or if the client reads
    nothing of its answer for ``stall_s``. A connection that its client may not have (``connections_of_clients``) is answered by the application
    ``refusal`` and closed; one that exceeds what the server can have is closed at once."""

    request_s = 30.0
    stall_s = 300.0
    connections_of_clients: ClientConnections | None = None
    refusal: Any = None
    _address: str | None = None
    _deadline: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _is_lost = False

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.app_state = {**self.app_state, CONNECTION: self}
        self._when_lost: list[Callable[[], None]] = []

    @property
    def has_body(self) -> bool:
        """Whether all of the body of the request is there."""
        return self.cycle is not None and not self.cycle.more_body

    def when_lost(self, call: Callable[[], None]) -> None:
        """Calls ``call`` when the client has closed the connection, whose end is looked for while nothing is read from it too."""
        self.flow.resume_reading()
        self._when_lost.append(call)
        if self._is_lost:
            self.loop.call_soon(self._call_when_lost)

    def no_longer_when_lost(self, call: Callable[[], None]) -> None:
        if call in self._when_lost:
            self._when_lost.remove(call)

    def _call_when_lost(self) -> None:
        calls, self._when_lost = self._when_lost, []
        for call in calls:
            call()

    @property
    def next_has_begun(self) -> bool:
        """Whether a part of the head of the next request is there."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        counted = self.connections_of_clients
        if counted is None:
            return
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if peer else ""
        is_welcome = counted.add(self._address)
        if counted.is_full:
            transport.abort()
        elif not is_welcome:
            self.app = self.refusal
            self._unwatch()
            self._deadline = self.loop.call_later(min(_REFUSED_S, self.request_s), transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.refusal is not None and self.app is self.refusal:
            self.transport.close()
        # An idle connection has a longer timeout.
        if self.next_has_begun:
            self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self.resume_writing()
        if self.connections_of_clients is not None and self._address is not None:
            self.connections_of_clients.remove(self._address)
            self._address = None
        super().connection_lost(exc)
        # uvicorn leaves the timer of a connection that was reset, and with it the request, for as long as an idle connection may live.
        self._unset_keepalive_if_required()
        self._is_lost = True
        self._call_when_lost()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.request_s, self.transport.abort)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class PatientProtocol(Patience, H11Protocol):
    """The same in pure Python, by h11."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.conn = StrictConnection(h11.SERVER)

    @property
    def next_has_begun(self) -> bool:
        return bool(self.conn.trailing_data[0])
