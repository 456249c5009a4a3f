"""Calls to a sidecar in another process of this machine, from the controller's side: frames over TCP."""

import socket
from collections.abc import Callable

from tandem.runtime.process.deadline import Deadline
from tandem.runtime.rpc.call_client import CallClient
from tandem.runtime.rpc.calls import Blobs, Meta
from tandem.runtime.rpc.channel import Channel
from tandem.types.wire import Frame


class RpcClient(CallClient):
    """Calls a sidecar's ``RpcServer``."""

    __slots__ = ()

    def _exchange(
        self, name: str, meta: Meta, blobs: Blobs | None, deadline: Deadline, connect_s: float,
        result: Callable[[Callable[[Deadline], Frame]], Frame],
    ) -> Frame:  # fmt: skip
        with socket.create_connection((self.host, self.port), connect_s) as connection:
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel(connection)
            admitted = Deadline(connect_s, deadline)
            channel.send({"credential": self.credential}, kind="hello", method=name, deadline=admitted)
            # A call is sent once it has been admitted, so that no large body is sent and then refused.
            if (answer := channel.receive(admitted)).kind == "refused":
                raise self.refused(name, str(answer.meta.get("message")))
            channel.admit()
            channel.send(meta, blobs, kind="call", method=name, deadline=deadline)
            return result(channel.receive)
