"""Calls to a sidecar in another process, from the sidecar's side: frames over TCP, on loopback by default.

A connection carries one call. The caller sends ``hello`` with the pod's credential and the name of the call, and is answered ``welcome`` or
``refused``; it sends ``call``, and is answered as ``tandem.runtime.rpc.calls`` says. Starts in a few milliseconds, with the standard library alone;
``http_server`` answers the same calls over HTTP, for callers on other machines.
"""

import contextlib
import logging
import selectors
import socket
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tandem.runtime.process.deadline import Deadline
from tandem.runtime.process.waits import WAITS
from tandem.runtime.rpc.call_server import CallServer, run_call
from tandem.runtime.rpc.calls import Blobs, Meta, Method
from tandem.runtime.rpc.channel import BrokenFrame, Channel
from tandem.types.errors import RunError
from tandem.types.wire import Frame

if TYPE_CHECKING:
    # Its modules are read where there are certificates alone.
    from tandem.runtime.rpc.pod_tls import PodTls

logger = logging.getLogger(__name__)

_HELLO_BYTES = 4096
"""The largest frame that is read from a caller before it has shown the credential."""


class RpcServer(CallServer):
    """Answers calls over TCP. A connection beyond ``max_connections`` is closed. ``tls``: callers show a certificate of a pod first, and what is sent is
    encrypted. See ``CallServer`` for the other arguments."""

    def __init__(self, methods: Mapping[str, Method], credential: str, *, name: str, tls: "PodTls | None" = None, **options: Any) -> None:
        self._tls = tls
        super().__init__(methods, credential, name=name, **options)

    def _open(self) -> None:
        self._connections = threading.BoundedSemaphore(self.max_connections)
        self._ending, self._wake = socket.socketpair()

    def serve_forever(self) -> None:
        """Answers calls from this thread until ``close``."""
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._ending, selectors.EVENT_READ)
            while self._ending not in [key.fileobj for key, _ in selector.select()]:
                with contextlib.suppress(OSError):  # The caller closed the connection before it was accepted.
                    self._admit(self._listener.accept()[0])

    def close(self) -> None:
        super().close()
        self._ending.close()

    def _stop(self) -> None:
        self._wake.close()

    def _admit(self, connection: socket.socket) -> None:
        if not self._connections.acquire(blocking=False):
            logger.warning("%s: too many connections at once; one refused", self.name)
            connection.close()
            return
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._serve, args=(connection,), name=f"{self.name}-call", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, self._secured(connection) as secured:
                self._converse(Channel(secured), secured)
        except RunError as error:
            logger.warning("%s: a connection was refused: %s", self.name, error)
        except (OSError, EOFError, BrokenFrame) as error:
            logger.info("%s: a connection was dropped: %s", self.name, error or type(error).__name__)
        except Exception:
            logger.exception("%s: a connection failed", self.name)
        finally:
            self._connections.release()

    def _secured(self, connection: socket.socket) -> socket.socket:
        """Returns what carries the conversation over ``connection``. Raises ``RunError`` for a caller that is not one."""
        return connection if self._tls is None else self._tls.accept(connection, Deadline(self.request_s))

    def _converse(self, channel: Channel, connection: socket.socket) -> None:
        deadline = Deadline(self.request_s)
        try:
            hello = channel.receive(deadline, _HELLO_BYTES)
            if not self._is_admitted(hello):
                return self._refuse(channel, connection, "wrong credential")
            method = self.methods.get(hello.method)
            if method is None:
                return self._refuse(channel, connection, f"{self.name} has no call '{hello.method}'")
            channel.admit()
            channel.send({}, kind="welcome", deadline=deadline)
            call = channel.receive(deadline, self.max_body_bytes)
        except BrokenFrame as error:
            return self._refuse(channel, connection, str(error))
        return self._answer(channel, hello.method, method, call)

    def _is_admitted(self, hello: Frame) -> bool:
        credential = hello.meta.get("credential")
        return hello.kind == "hello" and isinstance(credential, str) and self._is_credential(credential)

    def _answer(self, channel: Channel, name: str, method: Method, call: Frame) -> None:
        """Runs the call in this thread, and sends a heartbeat every ``heartbeat_s`` from another one."""
        done, disconnected = threading.Event(), threading.Event()

        def send(meta: Meta, blobs: Blobs, kind: str) -> None:
            if disconnected.is_set():
                return
            try:
                channel.send(meta, blobs, kind=kind, deadline=Deadline(self.request_s))
            except (OSError, EOFError):
                disconnected.set()
                logger.warning("%s: the caller of '%s' closed the connection before its answer", self.name, name)

        def beat() -> None:
            while not done.wait(self.heartbeat_s):
                send(WAITS.heartbeat_meta(), {}, "heartbeat")

        threading.Thread(target=beat, name=f"{self.name}-heartbeat", daemon=True).start()
        try:
            run_call(method, call, send)
        finally:
            done.set()

    def _refuse(self, channel: Channel, connection: socket.socket, text: str) -> None:
        channel.send({"message": text}, kind="refused", deadline=Deadline(1.0))
        # Closing a socket with unread input resets the connection, and the caller would not see the answer.
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(1.0)
        for _ in range(16):
            if not connection.recv(2**16):
                return
