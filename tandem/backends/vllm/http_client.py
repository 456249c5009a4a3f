"""HTTP with JSON bodies to a server of vLLM behind a Unix socket, a connection for each call. Standard library alone; may be called from many threads."""

import contextlib
import http.client
import json
import socket
import threading
from pathlib import Path
from typing import Any

from tandem.types.errors import EngineDied


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))


class Call:
    """One call of a server, which another thread can give up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_given_up = False

    def give_up(self) -> None:
        """Closes the connection, on which vLLM aborts the request, and lets the call raise ``EngineDied``, at once or when it is made."""
        with self._lock:
            self._is_given_up = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # The answer was read just now.
                    self._socket.shutdown(socket.SHUT_RDWR)

    def begin(self, connected: socket.socket) -> None:
        """Notes the connection of the call. Raises ``OSError`` if it was given up."""
        with self._lock:
            if self._is_given_up:
                raise ConnectionAbortedError("the call was given up")
            self._socket = connected


class VllmClient:
    """Calls the server behind the socket ``path``. No call has a deadline of its own: the pod ends a worker whose call takes too long, and the server with
    it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, path: str) -> Any:
        """Returns the body of the answer to a ``GET``."""
        return self._call("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None = None, call: Call | None = None) -> Any:
        """Returns the body of the answer to a ``POST``. Raises ``EngineDied`` if the server ended, or answered with an error, or ``call`` was given up."""
        return self._call("POST", path, {} if body is None else body, call)

    def ask_workers(self, method: str) -> list[Any]:
        """Returns what ``method`` of ``WorkerExtension`` returned on each tensor-parallel rank."""
        answer = self.post("/collective_rpc", {"method": method})
        return [] if answer is None else list(answer["results"])

    def _call(self, method: str, path: str, body: dict[str, Any] | None, call: Call | None = None) -> Any:
        # The server closes a connection that was idle for 5 s, and a call that meets this could not be repeated safely.
        connection = _UnixConnection(self._path)
        try:
            content = None if body is None else json.dumps(body)
            connection.connect()
            if call is not None:
                call.begin(connection.sock)
            connection.request(method, path, content, {"Connection": "close", **({} if body is None else {"Content-Type": "application/json"})})
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise EngineDied(f"the server of vLLM does not answer {path}: {error or type(error).__name__}") from None
        finally:
            connection.close()
        if response.status != 200:
            raise EngineDied(f"the server of vLLM answered {path} with {response.status}: {_reason(data)}")
        return json.loads(data) if data else None


def _reason(data: bytes) -> str:
    """Returns the message of an error's body on one line."""
    text = data.decode("utf-8", "replace")
    try:
        error = json.loads(text)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(text.split())[:1000]
