"""``/metrics`` of a process that serves nothing else: a run's controller."""

import contextlib
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CLIENT_S = 10.0
"""Time for a client to send its request, and to read the answer."""
MOST_CLIENTS = 16
"""Connections at once; further ones are closed."""


def serving_in_thread(server: ThreadingHTTPServer, name: str) -> Callable[[], None]:
    """Serves in a thread ``name``; returns what ends that and closes the listener. It does not wait for clients."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, name=name, daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return close


class MetricsServer:
    """Answers ``GET /metrics`` on ``listener`` with ``text()`` of ``content_type``, in threads of its own, until ``close``."""

    def __init__(self, listener: socket.socket, text: Callable[[], bytes], content_type: str) -> None:
        handler = type("Handler", (_Handler,), {"text": staticmethod(text), "content_type": content_type})
        self._server = _Server(listener, handler)
        self.close = serving_in_thread(self._server, "metrics")
        """Stops answering and closes the listener. Does not wait for clients."""

    @property
    def address(self) -> tuple[Any, ...]:
        """The address of the listener, as ``getsockname`` gives it."""
        return self._server.socket.getsockname()  # type: ignore[no-any-return]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("", 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_address = listener.getsockname()
        self._room = threading.BoundedSemaphore(MOST_CLIENTS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no event of the run."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "tandem", ""
    timeout = CLIENT_S
    text: Callable[[], bytes]
    content_type: str

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, self.text(), self.content_type)
        else:
            self._answer(404, b"there is /metrics\n", "text/plain; charset=utf-8")

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(OSError):
                self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no events of the run."""
