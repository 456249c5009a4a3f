"""Calls to a sidecar on another machine, from the side of the controller: frames as the bodies of HTTP. Standard library alone."""

import http.client
import socket
import time
from collections.abc import Callable

from tandem.runtime.rpc.calls import Blobs, Meta, Progress
from tandem.runtime.rpc.channel import BrokenFrame, FrameReader
from tandem.runtime.rpc.rpc_client import Caller
from tandem.types.wire import Frame, encode


class HttpClient(Caller):
    """Calls a sidecar's ``HttpServer``."""

    __slots__ = ()

    def call(
        self,
        name: str,
        meta: Meta | None = None,
        blobs: Blobs | None = None,
        *,
        deadline_s: float,
        on_progress: Progress | None = None,
    ) -> Frame:
        """Returns the result of the call ``name``; raises what ``RpcClient.call`` raises."""
        ends = time.monotonic() + deadline_s
        connection = http.client.HTTPConnection(self.host, self.port, timeout=min(self.heartbeat_timeout_s, deadline_s))
        try:
            headers = {"Authorization": f"Bearer {self.credential}", "Content-Type": "application/octet-stream", "Connection": "close"}
            connection.request("POST", f"/call/{name}", encode(meta or {}, blobs, "call", name), headers)
            # The response takes the socket over and closes the connection's own reference to it.
            stream: socket.socket = connection.sock
            response = connection.getresponse()
            if response.status != 200:
                raise self.refused(name, f"{response.status} {response.read(1000).decode('utf-8', 'replace').strip()}")
            return self.result(name, FrameReader(_reading(response, stream)).receive, ends, deadline_s, on_progress)
        except TimeoutError:
            raise self.timeout(name, ends, deadline_s) from None
        except (OSError, EOFError, BrokenFrame, http.client.HTTPException) as error:
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
