"""Calls to a sidecar on another machine, from the controller's side: frames as the bodies of HTTP. Standard library alone."""

import contextlib
import http.client
import io
import select
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tandem.runtime.process.deadline import Deadline
from tandem.runtime.rpc.call_client import CallClient
from tandem.runtime.rpc.calls import Blobs, Meta
from tandem.runtime.rpc.channel import FrameReader
from tandem.runtime.rpc.pod_tls import PodTls, RefusedTls, TlsSocket, describe_tls, wait_for
from tandem.runtime.rpc.traced import sent_with
from tandem.types.wire import Frame, encode


@dataclass(frozen=True, slots=True)
class HttpClient(CallClient):
    """Calls a sidecar's ``HttpServer``. ``tls``: with which both show each other that they are pods; ``None``: nothing is encrypted."""

    tls: PodTls | None = None
    _open: "list[_Stream | _TlsStream]" = field(default_factory=list, init=False, repr=False, compare=False)

    def abort(self) -> None:
        """Ends the calls that are in progress, in their threads, as if the sidecar had closed their connections."""
        for stream in [*self._open]:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def _exchange(
        self, name: str, meta: Meta, blobs: Blobs | None, deadline: Deadline, connect_s: float,
        result: Callable[[Callable[[Deadline], Frame]], Frame],
    ) -> Frame:  # fmt: skip
        connection = http.client.HTTPConnection(self.host, self.port, timeout=connect_s)
        stream: _Stream | _TlsStream | None = None
        try:
            connection.connect()
            # The response takes the socket over and closes the connection's own reference to it.
            connection.sock = stream = self._stream(connection.sock, Deadline(connect_s, deadline))
            self._open.append(stream)
            headers = {"Authorization": f"Bearer {self.credential}", "Content-Type": "application/octet-stream", "Connection": "close"}
            connection.request("POST", f"/call/{name}", encode(meta, blobs, "call", name, 0, *sent_with("call")), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self.refused(name, f"{response.status} {response.read(1000).decode('utf-8', 'replace').strip()}")
            return result(FrameReader(_reading(response, stream)).receive)
        except RefusedTls as error:
            raise self.refused(name, str(error)) from None
        except (ssl.SSLError, http.client.RemoteDisconnected) as error:
            if self.tls is None:
                raise self.died(name, error) from None
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                raise self.refused(name, describe_tls(error)) from None
            # A server ends a handshake without a word.
            hint = "it closed the connection before it answered, as one does that accepts no certificate of this machine's authorities"
            raise self.died(name, OSError(hint)) from None
        except http.client.HTTPException as error:
            raise self.died(name, error) from None
        finally:
            if stream is not None:
                self._open.remove(stream)
            connection.close()

    def _stream(self, connection: socket.socket, deadline: Deadline) -> "_Stream | _TlsStream":
        if self.tls is None:
            return _Stream(connection, deadline)
        return _TlsStream(self.tls.connect(connection, deadline), deadline)


class _TlsStream:
    """What ``http.client`` needs of a connected socket, under TLS: reads end at ``deadline``, which may be set anew. Takes ``connection`` over, which is closed
    with what reads from it, as that of a socket is."""

    def __init__(self, connection: TlsSocket, deadline: Deadline | None) -> None:
        self.connection, self.deadline = connection, deadline
        self._is_read = False

    def sendall(self, data: Any) -> None:
        view = memoryview(data)
        while len(view):
            try:
                view = view[self.connection.send(view) :]
            except BlockingIOError:
                wait_for(self.connection, select.POLLOUT, None if self.deadline is None else self.deadline.nap_s())

    def makefile(self, mode: str) -> io.BufferedReader:
        self._is_read = True
        return io.BufferedReader(_TlsReader(self))

    def shutdown(self, how: int) -> None:
        self.connection.shutdown(how)

    def close(self) -> None:
        if not self._is_read:
            self.connection.close()


class _TlsReader(io.RawIOBase):
    def __init__(self, stream: _TlsStream) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._stream.deadline is not None:
                self._stream.deadline.nap_s()
            try:
                return self._stream.connection.recv_into(buffer)
            except BlockingIOError:
                continue

    def close(self) -> None:
        self._stream.connection.close()
        super().close()


class _Stream(socket.socket):
    """A connected socket whose reads end at ``deadline``, which may be set anew. Takes ``connection`` over."""

    def __init__(self, connection: socket.socket, deadline: Deadline | None) -> None:
        timeout_s = connection.gettimeout()
        super().__init__(connection.family, connection.type, connection.proto, fileno=connection.detach())
        self.settimeout(timeout_s)
        self.deadline = deadline
        self._readable = select.poll()
        self._readable.register(self, select.POLLIN)

    def recv_into(self, *arguments: Any, **keywords: Any) -> int:
        while self.deadline is not None:
            nap_s = self.deadline.nap_s()
            if self._readable.poll(None if nap_s is None else nap_s * 1000):
                break
        return super().recv_into(*arguments, **keywords)


def _reading(response: http.client.HTTPResponse, stream: _Stream | _TlsStream) -> Callable[[memoryview, Deadline | None], int]:
    def read_into(view: memoryview, deadline: Deadline | None) -> int:
        stream.deadline = deadline
        part = response.read1(len(view))
        view[: len(part)] = part
        return len(part)

    return read_into
