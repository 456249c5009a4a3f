"""Calls to a sidecar on another machine, from the controller's side: frames as the bodies of HTTP. Standard library alone."""

import http.client
import socket
import time
from collections.abc import Callable

from tandem.runtime.rpc.call_client import CallClient
from tandem.runtime.rpc.calls import Blobs, Meta
from tandem.runtime.rpc.channel import FrameReader
from tandem.types.wire import Frame, encode


class HttpClient(CallClient):
    """Calls a sidecar's ``HttpServer``."""

    __slots__ = ()

    def _exchange(
        self, name: str, meta: Meta, blobs: Blobs | None, ends: float, connect_s: float, result: Callable[[Callable[[float], Frame]], Frame]
    ) -> Frame:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=connect_s)
        try:
            headers = {"Authorization": f"Bearer {self.credential}", "Content-Type": "application/octet-stream", "Connection": "close"}
            connection.request("POST", f"/call/{name}", encode(meta, blobs, "call", name), headers)
            # The response takes the socket over and closes the connection's own reference to it.
            stream: socket.socket = connection.sock
            response = connection.getresponse()
            if response.status != 200:
                raise self.refused(name, f"{response.status} {response.read(1000).decode('utf-8', 'replace').strip()}")
            return result(FrameReader(_reading(response, stream)).receive)
        except http.client.HTTPException as error:
            raise self.died(name, error) from None
        finally:
            connection.close()


def _reading(response: http.client.HTTPResponse, stream: socket.socket) -> Callable[[memoryview, float | None], int]:
    def read_into(view: memoryview, ends: float | None) -> int:
        left = None if ends is None else ends - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        stream.settimeout(left)
        part = response.read1(len(view))
        view[: len(part)] = part
        return len(part)

    return read_into
