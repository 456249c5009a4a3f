"""Answers Prometheus' HTTP API from a metrics database, on this machine, in threads of its own."""

import json
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tandem.metrics_database.answers import Answers
from tandem.runtime.exposition.http_server import serving_in_thread
from tandem.types import RunError, UserError

_API = "/api/v1/"
_MOST_BYTES = 100_000


class ApiServer:
    """Answers on ``listener`` until ``close``."""

    def __init__(self, listener: socket.socket, answers: Answers) -> None:
        handler = type("Handler", (_Handler,), {"answers": answers})
        self._server = ThreadingHTTPServer(("", 0), handler, bind_and_activate=False)
        self._server.daemon_threads, self._server.block_on_close = True, False
        self._server.socket.close()
        self._server.socket = listener
        self.close = serving_in_thread(self._server, "metrics-api")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30.0
    answers: Answers

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self._answer(parts.path, parse_qs(parts.query, keep_blank_values=True))

    def do_POST(self) -> None:
        """A query of Grafana comes as a form."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _MOST_BYTES:
            self.close_connection = True
            self._send(413, {"status": "error", "errorType": "bad_data", "error": f"a query has at most {_MOST_BYTES} bytes, and says how many"})
            return
        given = parse_qs(self.rfile.read(int(length)).decode("utf-8", "replace"), keep_blank_values=True)
        parts = urlsplit(self.path)
        self._answer(parts.path, {**parse_qs(parts.query, keep_blank_values=True), **given})

    def _answer(self, path: str, given: dict[str, list[str]]) -> None:
        if path in ("/-/ready", "/-/healthy"):
            self._send(200, {"status": "success"})
        elif not path.startswith(_API):
            self._send(404, {"status": "error", "errorType": "not_found", "error": f"there is no {path[:100]}; the API is at {_API}"})
        else:
            try:
                self._send(200, {"status": "success", "data": self.answers.answer(path.removeprefix(_API), given)})
            except RunError as error:  # One of them is a UserError.
                self._send(503, {"status": "error", "errorType": "unavailable", "error": str(error)})
            except UserError as error:
                self._send(400, {"status": "error", "errorType": "bad_data", "error": str(error)})

    def _send(self, status: int, body: Any) -> None:
        data = json.dumps(body, separators=(",", ":")).encode()
        self.send_response(status)
        for name, value in (("Content-Type", "application/json"), ("Content-Length", str(len(data))), ("X-Content-Type-Options", "nosniff")):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged of requests."""
