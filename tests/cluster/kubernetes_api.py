"""An API server that answers what is recorded and nothing else, over HTTPS, and the kubeconfig with which the real client finds it.

``recorded_kubernetes.yaml`` has the exchanges: requests and answers in the form of the published API, written by hand, because no cluster was there to record.
"""

import base64
import functools
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml
from certificates import certificate
from kubernetes_schemas import check

TOKEN = "recorded-token"
_RECORDING = Path(__file__).parent / "recorded_kubernetes.yaml"


@functools.cache
def recording() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load(_RECORDING.read_text(encoding="utf-8")))


@dataclass
class RecordedApi:
    """``expected``: names of exchanges; each is used as often as it is there. ``bodies``: what was sent, by method and path. ``wrong``: what was not
    expected."""

    kubeconfig: Path
    url: str
    expected: list[str] = field(default_factory=list)
    changes: dict[str, Any] = field(default_factory=dict)
    bodies: list[tuple[str, str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def expect(self, *names: str, **changes: Any) -> None:
        """The next requests are these exchanges, in any order. ``changes``: other bodies of answers."""
        assert all(name in recording() for name in names), names
        self.expected.extend(names)
        self.changes.update(changes)

    def finished(self) -> None:
        """Raises if a request was not recorded, or one that is expected has not come."""
        assert self.wrong == [] and self.expected == [], (self.wrong, self.expected)

    def answer(self, method: str, target: str, body: Any) -> tuple[int, Any, float]:
        """Returns status and body of the answer, and after how long it comes."""
        parts = urlsplit(target)
        request = {"method": method, "path": parts.path, "query": dict(parse_qsl(parts.query))}
        with self._lock:
            name = next((name for name in self.expected if {"query": {}, **recording()[name]["request"]} == request), None)
            if name is None:
                self.wrong.append(f"{method} {target}")
                return 500, {"kind": "Status", "message": f"not recorded: {method} {target}"}, 0.0
            self.expected.remove(name)
            if method == "POST":
                try:
                    check(body)
                except Exception as error:
                    self.wrong.append(f"{method} {target}: {error}")
                    return 400, {"kind": "Status", "message": "the body is not valid"}, 0.0
            self.bodies.append((method, target, body))
        response = recording()[name]["response"]
        found = self.changes.get(name, response.get("body"))
        if found is None:
            # As a server that makes an object: what was sent, with what it adds.
            found = {**body, "metadata": {**body["metadata"], "uid": "8c5e1a0e-0000-4000-8000-000000000001", "namespace": "lab", "resourceVersion": "1"}}
        return response.get("status", 200), found, response.get("after_s", 0.0)

    def sent(self, method: str, part: str) -> list[Any]:
        """Returns the bodies of requests whose address has ``part``."""
        return [body for each, target, body in self.bodies if each == method and part in target]


@contextmanager
def recorded_api(folder: Path) -> Iterator[RecordedApi]:
    """Runs the server inside. Its certificate, and the kubeconfig with its authority, are in ``folder``."""
    authority = certificate(folder, "ca")
    certificate(folder, "server", authority)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            text = self.rfile.read(length)
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                api.wrong.append(f"{self.command} {self.path}: no token")
            status, body, after_s = api.answer(self.command, self.path, json.loads(text) if text else None)
            time.sleep(after_s)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = do_PATCH = do_PUT = do  # noqa: N815

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that does not wait for its answer is no error of the server."""

    server = Server(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = f"https://127.0.0.1:{server.server_port}"
    api = RecordedApi(folder / "kubeconfig", url)
    api.kubeconfig.write_text(yaml.safe_dump(kubeconfig(url, folder / "ca.crt", {"token": TOKEN})), encoding="utf-8")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def kubeconfig(url: str, authority: Path, user: dict[str, Any]) -> dict[str, Any]:
    """Returns a kubeconfig with the contexts ``lab`` (the current one) and ``other``."""
    data = base64.b64encode(authority.read_bytes()).decode()
    return {
        "apiVersion": "v1", "kind": "Config", "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": {"server": url, "certificate-authority-data": data}}],
        "users": [{"name": "me", "user": user}],
        "contexts": [
            {"name": "lab", "context": {"cluster": "lab", "user": "me", "namespace": "lab"}},
            {"name": "other", "context": {"cluster": "lab", "user": "me"}},
        ],
    }  # fmt: skip
