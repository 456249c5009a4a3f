"""Calls to a sidecar in another process of this machine, from the controller's side: frames over TCP."""

import socket
import time
from collections.abc import Callable

from tandem.runtime.rpc.call_client import CallClient
from tandem.runtime.rpc.calls import Blobs, Meta
from tandem.runtime.rpc.channel import Channel
from tandem.types.wire import Frame


class RpcClient(CallClient):
    """Calls a sidecar's ``RpcServer``."""

    __slots__ = ()

    def _exchange(
        self, name: str, meta: Meta, blobs: Blobs | None, ends: float, connect_s: float, result: Callable[[Callable[[float], Frame]], Frame]
    ) -> Frame:
        with socket.create_connection((self.host, self.port), connect_s) as connection:
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel(connection)
            until = min(time.monotonic() + connect_s, ends)
            channel.send({"credential": self.credential}, kind="hello", method=name, ends=until)
            # A call is sent once it has been admitted, so that no large body is sent and then refused.
            if (answer := channel.receive(until)).kind == "refused":
                raise self.refused(name, str(answer.meta.get("message")))
            channel.send(meta, blobs, kind="call", method=name, ends=ends)
            return result(channel.receive)
