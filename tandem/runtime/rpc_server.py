"""The side of the control channel that answers: HTTP on loopback, inside each sidecar's shim.

``POST /call/NAME`` with ``Authorization: Bearer CREDENTIAL`` and one frame as its body; the answer is a stream of
frames that ends with the connection. ``GET /health`` says, without a credential, that the process is there.
"""

import contextlib
import hmac
import logging
import queue
import socket
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tandem.runtime.calls import MAX_FRAME_BYTES, Method, StepPoints, error_meta
from tandem.runtime.faults import FaultPoint, no_fault
from tandem.types.errors import UserError
from tandem.types.wire import Frame, decode, encode

logger = logging.getLogger(__name__)


class RpcServer:
    """Answers calls from threads of its own. ``port`` 0 takes a free one; ``.port`` is what it has.

    ``name``: this sidecar, for errors. ``heartbeat_s``: how often a running call says that this process lives.
    ``request_s``: how long a client may take to send its request, headers and body, and to take a part of the answer.
    Raises ``UserError`` where the port is taken.
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
        try:
            self._http = _Http((host, port), self, max_connections)
        except OSError as error:
            raise UserError(f"{name}: port {port} on {host} cannot be taken ({error.strerror}); choose a free one, or 0 for any") from None
        self.port: int = self._http.server_address[1]
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Answer from a background thread."""
        self._thread = threading.Thread(target=self._http.serve_forever, name=f"{self.name}-rpc", daemon=True)
        self._thread.start()

    def serve_forever(self) -> None:
        """Answer from this thread until ``close``."""
        self._http.serve_forever()

    def close(self) -> None:
        """Take no more calls. Those that run are left to their threads, which end with the process."""
        self._http.shutdown()
        self._http.server_close()
        if self._thread is not None:
            self._thread.join()

    def authorised(self, header: str) -> bool:
        return hmac.compare_digest(header.encode("utf-8", "replace"), b"Bearer " + self._credential)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], rpc: RpcServer, max_connections: int) -> None:
        self.rpc = rpc
        self.connections = threading.BoundedSemaphore(max_connections)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.connections.acquire(blocking=False):
            logger.warning("%s: too many connections at once; one refused", self.rpc.name)
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.info("%s: a connection was dropped", self.rpc.name, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Http
    protocol_version = "HTTP/1.0"

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.rpc.request_s)
        # A socket's own time-out starts anew with every byte; this one does not.
        self._watchdog = threading.Timer(self.server.rpc.request_s, self._hang_up)
        self._watchdog.daemon = True
        self._watchdog.start()

    def finish(self) -> None:
        self._watchdog.cancel()
        super().finish()

    def _hang_up(self) -> None:
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("a slow client went away by itself")

    def do_GET(self) -> None:
        self._watchdog.cancel()
        self._refuse(200, "alive") if self.path == "/health" else self._refuse(404, "no such page")

    def do_POST(self) -> None:
        rpc = self.server.rpc
        if not rpc.authorised(self.headers.get("Authorization", "")):
            return self._refuse(401, "wrong credential")
        method = rpc.methods.get(self.path.removeprefix("/call/")) if self.path.startswith("/call/") else None
        if method is None:
            return self._refuse(404, f"{rpc.name} has no call {self.path}")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            return self._refuse(411, "a call needs a Content-Length")
        if int(length) > rpc.max_body_bytes:
            return self._refuse(413, f"a call of {length} bytes; at most {rpc.max_body_bytes} are allowed")
        body = self.rfile.read(int(length))
        self._watchdog.cancel()
        try:
            frame = decode(body)
        except ValueError as error:
            return self._refuse(400, str(error))
        return self._answer(method, frame)

    def _answer(self, method: Method, frame: Frame) -> None:
        """Run the call in a thread of its own and stream what it says."""
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.end_headers()
        spoken: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                meta, blobs = method(frame.meta, frame.blobs, lambda progress: spoken.put(encode(progress, kind="progress")))
                spoken.put(encode(meta, blobs, "result"))
            except BaseException as error:
                spoken.put(encode(error_meta(error), kind="error"))
            finally:
                spoken.put(None)

        threading.Thread(target=run, name=self.path, daemon=True).start()
        heartbeat = encode({}, kind="heartbeat")
        while True:
            try:
                part = spoken.get(timeout=self.server.rpc.heartbeat_s)
            except queue.Empty:
                part = heartbeat
            if part is None:
                return
            try:
                self.wfile.write(part)
            except OSError:
                logger.warning("%s: the caller of %s went away before its answer", self.server.rpc.name, self.path)
                return

    def _refuse(self, status: int, text: str) -> None:
        body = (text + "\n").encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self._drain()

    def _drain(self) -> None:
        # Closing a socket with unread input resets the connection, and the client would not see the answer.
        self.wfile.flush()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            for _ in range(16):
                if not self.connection.recv(2**16):
                    return

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("%s: " + format, self.server.rpc.name, *args)
