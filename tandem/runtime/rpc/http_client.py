"""Calls to a sidecar on another machine, from the controller's side: frames as the bodies of HTTP. Standard library alone."""

import http.client
import select
import socket
from collections.abc import Callable
from typing import Any

from tandem.runtime.process.deadline import Deadline
from tandem.runtime.rpc.call_client import CallClient
from tandem.runtime.rpc.calls import Blobs, Meta
from tandem.runtime.rpc.channel import FrameReader
from tandem.types.wire import Frame, encode


class HttpClient(CallClient):
    """Calls a sidecar's ``HttpServer``."""

    __slots__ = ()

    def _exchange(
        self, name: str, meta: Meta, blobs: Blobs | None, deadline: Deadline, connect_s: float,
        result: Callable[[Callable[[Deadline], Frame]], Frame],
    ) -> Frame:  # fmt: skip
        connection = http.client.HTTPConnection(self.host, self.port, timeout=connect_s)
        try:
            connection.connect()
            # The response takes the socket over and closes the connection's own reference to it.
            connection.sock = stream = _Stream(connection.sock, Deadline(connect_s, deadline))
            headers = {"Authorization": f"Bearer {self.credential}", "Content-Type": "application/octet-stream", "Connection": "close"}
            connection.request("POST", f"/call/{name}", encode(meta, blobs, "call", name), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self.refused(name, f"{response.status} {response.read(1000).decode('utf-8', 'replace').strip()}")
            return result(FrameReader(_reading(response, stream)).receive)
        except http.client.HTTPException as error:
            raise self.died(name, error) from None
        finally:
            connection.close()


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


def _reading(response: http.client.HTTPResponse, stream: _Stream) -> Callable[[memoryview, Deadline | None], int]:
    def read_into(view: memoryview, deadline: Deadline | None) -> int:
        stream.deadline = deadline
        part = response.read1(len(view))
        view[: len(part)] = part
        return len(part)

    return read_into
