"""Calls to a sidecar in another process, from the sidecar's side: frames over TCP, on loopback by default.

A connection carries one call. The caller sends ``hello`` with the pod's credential and the name of the call, and is answered ``welcome`` or
``refused``; it sends ``call``, and is answered as ``tandem.runtime.rpc.calls`` says. Starts in a few milliseconds, with the standard library alone;
``http_server`` answers the same calls over HTTP, for callers on other machines.
"""

import contextlib
import hmac
import logging
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from tandem.runtime.process.faults import FaultPoint, no_fault
from tandem.runtime.rpc.calls import Method, StepPoints, error_meta
from tandem.runtime.rpc.channel import BrokenFrame, Channel
from tandem.types.errors import UserError
from tandem.types.wire import MAX_FRAME_BYTES, Frame

logger = logging.getLogger(__name__)

_HELLO_BYTES = 4096
"""At most this is read of a caller that has not shown the credential."""
_BACKLOG = 128


class RpcServer:
    """Answers calls, each in a thread of its own.

    Args:
        name: what errors call this sidecar.
        port: 0 takes a free one; ``.port`` is what it has.
        heartbeat_s: how often a call in progress says that this process is alive.
        request_s: how long a caller may take to send its call, and to take each frame of the answer.
        max_connections: more at once are refused.

    Raises:
        UserError: the port cannot be taken.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        credential: str,
        *,
        name: str,
        host: str = "127.0.0.1",
        port: int = 0,
        heartbeat_s: float = 1.0,
        request_s: float = 10.0,
        max_body_bytes: int = MAX_FRAME_BYTES,
        max_connections: int = 64,
        fault_point: FaultPoint = no_fault,
    ) -> None:
        points = StepPoints(fault_point)
        self.name, self.heartbeat_s, self.request_s, self.max_body_bytes = name, heartbeat_s, request_s, max_body_bytes
        self.methods = {call: points.around(call, method) for call, method in methods.items()}
        self._credential = credential.encode()
        self._connections = threading.BoundedSemaphore(max_connections)
        self._listener = listen(name, host, port)
        self.port: int = self._listener.getsockname()[1]
        self._ending, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self.serve_forever, name=f"{name}-rpc", daemon=True)

    def start(self) -> None:
        """Answers from a background thread."""
        self._thread.start()

    def serve_forever(self) -> None:
        """Answers from this thread until ``close``."""
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._ending, selectors.EVENT_READ)
            while self._ending not in [key.fileobj for key, _ in selector.select()]:
                with contextlib.suppress(OSError):  # The caller left before it was let in.
                    self._admit(self._listener.accept()[0])

    def close(self) -> None:
        """Takes no more calls. Calls in progress are left to their threads, which end with the process."""
        self._wake.close()
        if self._thread.ident is not None:
            self._thread.join()
        self._listener.close()
        self._ending.close()

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
            with connection:
                self._converse(Channel(connection), connection)
        except (OSError, EOFError, BrokenFrame) as error:
            logger.info("%s: a connection was dropped: %s", self.name, error or type(error).__name__)
        except Exception:
            logger.exception("%s: a connection failed", self.name)
        finally:
            self._connections.release()

    def _converse(self, channel: Channel, connection: socket.socket) -> None:
        ends = time.monotonic() + self.request_s
        try:
            hello = channel.receive(ends, _HELLO_BYTES)
            if not self._knows(hello):
                return self._refuse(channel, connection, "wrong credential")
            method = self.methods.get(hello.method)
            if method is None:
                return self._refuse(channel, connection, f"{self.name} has no call '{hello.method}'")
            channel.send({}, kind="welcome", ends=ends)
            call = channel.receive(ends, self.max_body_bytes)
        except BrokenFrame as error:
            return self._refuse(channel, connection, str(error))
        return self._answer(channel, hello.method, method, call)

    def _knows(self, hello: Frame) -> bool:
        given = hello.meta.get("credential")
        return hello.kind == "hello" and isinstance(given, str) and hmac.compare_digest(given.encode("utf-8", "replace"), self._credential)

    def _answer(self, channel: Channel, name: str, method: Method, call: Frame) -> None:
        """Runs the call in this thread, beside one that says every ``heartbeat_s`` that this process is alive."""
        done, gone = threading.Event(), threading.Event()

        def send(meta: Mapping[str, Any], blobs: Any = None, *, kind: str) -> None:
            if gone.is_set():
                return
            try:
                channel.send(meta, blobs, kind=kind, ends=time.monotonic() + self.request_s)
            except (OSError, EOFError):
                gone.set()
                logger.warning("%s: the caller of '%s' went away before its answer", self.name, name)

        def beat() -> None:
            while not done.wait(self.heartbeat_s):
                send({}, kind="heartbeat")

        threading.Thread(target=beat, name=f"{self.name}-heartbeat", daemon=True).start()
        try:
            meta, blobs = method(call.meta, call.blobs, lambda progress: send(progress, kind="progress"))
            send(meta, blobs, kind="result")
        except BaseException as error:
            send(error_meta(error), kind="error")
        finally:
            done.set()

    def _refuse(self, channel: Channel, connection: socket.socket, text: str) -> None:
        channel.send({"message": text}, kind="refused", ends=time.monotonic() + 1.0)
        # Closing a socket with unread input resets the connection, and the caller would not see the answer.
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(1.0)
        for _ in range(16):
            if not connection.recv(2**16):
                return


def listen(name: str, host: str, port: int) -> socket.socket:
    """Returns a listening TCP socket. Raises ``UserError`` where the address cannot be taken."""
    try:
        return socket.create_server((host, port), backlog=_BACKLOG)
    except OSError as error:
        raise UserError(f"{name}: port {port} on {host} cannot be taken ({error.strerror}); choose a free one, or 0 for any") from None
