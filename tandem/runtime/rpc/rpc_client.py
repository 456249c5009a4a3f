"""Calls to a sidecar in another process of this machine, from the controller's side: frames over TCP."""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.runtime.process.deadline import Deadline
from tandem.runtime.rpc.call_client import CallClient
from tandem.runtime.rpc.calls import Blobs, Meta
from tandem.runtime.rpc.channel import Channel
from tandem.types.errors import RunError
from tandem.types.wire import Frame

if TYPE_CHECKING:
    from tandem.runtime.rpc.pod_tls import PodTls


@dataclass(frozen=True, slots=True)
class RpcClient(CallClient):
    """Calls a sidecar's ``RpcServer``. ``tls``: with which both show each other that they are pods; ``None``: nothing is encrypted."""

    tls: "PodTls | None" = None

    def _exchange(
        self, name: str, meta: Meta, blobs: Blobs | None, deadline: Deadline, connect_s: float,
        result: Callable[[Callable[[Deadline], Frame]], Frame],
    ) -> Frame:  # fmt: skip
        with socket.create_connection((self.host, self.port), connect_s) as connection:
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            admitted = Deadline(connect_s, deadline)
            with self._secured(name, connection, admitted) as secured:
                channel = Channel(secured)
                channel.send({"credential": self.credential}, kind="hello", method=name, deadline=admitted)
                # A call is sent once it has been admitted, so that no large body is sent and then refused.
                if (answer := channel.receive(admitted)).kind == "refused":
                    raise self.refused(name, str(answer.meta.get("message")))
                channel.admit()
                channel.send(meta, blobs, kind="call", method=name, deadline=deadline)
                return result(channel.receive)

    def _secured(self, name: str, connection: socket.socket, deadline: Deadline) -> socket.socket:
        if self.tls is None:
            return connection
        try:
            return self.tls.connect(connection, deadline)
        except RunError as error:
            # It has no certificate of a pod, or accepts none of this machine.
            raise self.refused(name, str(error)) from None
