"""A server that answers every GET with JSON."""

import http.server
import json
import threading
from collections.abc import Callable
from typing import Any


class JsonServer:
    """Answers with what ``answer`` returns for the path, from a thread of its own. ``asked``: how often it was asked."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.asked = 0
        self_ = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self_.asked += 1
                body = json.dumps(answer(self.path)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """Closes its address."""
        self._server.shutdown()
        self._server.server_close()
