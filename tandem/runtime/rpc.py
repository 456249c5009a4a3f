"""The side of the control channel that asks: the pod's controller. Every wait has an owner and a deadline."""

import http.client
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.runtime.calls import Blobs, Meta, PeerDied, Progress, RpcTimeout, raise_error, read_frame
from tandem.types.errors import RunError, UserError
from tandem.types.wire import PREFIX, Frame, encode


def new_credential() -> str:
    """A pod's secret: 256 random bits in hexadecimal. It goes to a shim by file or standard input, never by command
    line."""
    return os.urandom(32).hex()


def write_credential(path: Path, credential: str) -> None:
    """Write it to a fresh file that only this user can read."""
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(file, "w", encoding="ascii") as stream:
        stream.write(credential)


def read_credential(path: Path) -> str:
    """Raises ``UserError`` where the file is not there or others may read it."""
    try:
        mode = path.stat().st_mode & 0o777
        credential = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"the pod's credential {path} cannot be read: {error}") from None
    if mode & 0o077:
        raise UserError(f"the pod's credential {path} has mode {mode:o}; make it readable by its owner only (chmod 600)")
    return credential


@dataclass(frozen=True, slots=True)
class RpcClient:
    """Calls one sidecar's shim. ``peer`` names it in every error. ``heartbeat_timeout_s``: how long it may be silent
    while a call runs; a shim speaks every second, so silence means that it is stopped or starved."""

    peer: str
    port: int
    credential: str
    host: str = "127.0.0.1"
    heartbeat_timeout_s: float = 30.0

    def call(
        self,
        name: str,
        meta: Meta | None = None,
        blobs: Blobs | None = None,
        *,
        deadline_s: float,
        on_progress: Progress | None = None,
    ) -> Frame:
        """The result of the call ``name``, within ``deadline_s`` seconds.

        Raises ``RpcTimeout``, ``PeerDied``, whatever ``UserError``, ``RunError`` or ``WorkerDied`` the method raised,
        and ``RemoteError`` for anything else it raised.
        """
        ends = time.monotonic() + deadline_s
        body = encode(meta or {}, blobs)
        connection = http.client.HTTPConnection(self.host, self.port, timeout=min(self.heartbeat_timeout_s, deadline_s))
        try:
            headers = {"Authorization": f"Bearer {self.credential}", "Content-Type": "application/octet-stream"}
            connection.request("POST", f"/call/{name}", body, headers)
            # The response takes the socket over and closes the connection's own reference to it.
            stream: socket.socket = connection.sock
            response = connection.getresponse()
            if response.status != 200:
                text = response.read(1000).decode("utf-8", "replace").strip()
                raise RunError(f"{self.peer} refused the call '{name}': {response.status} {text}")
            return self._result(name, stream, response, ends, deadline_s, on_progress)
        except TimeoutError:
            raise self._timeout(name, ends, deadline_s) from None
        except (ConnectionError, http.client.HTTPException, socket.gaierror) as error:
            reason = str(error) or type(error).__name__
            raise PeerDied(self.peer, name, f"{self.peer} is gone: no answer to '{name}' ({reason})") from None
        finally:
            connection.close()

    def _result(
        self,
        name: str,
        stream: socket.socket,
        response: http.client.HTTPResponse,
        ends: float,
        deadline_s: float,
        on_progress: Progress | None,
    ) -> Frame:
        while True:
            # A frame's first byte starts its clock, so a frame that trickles cannot outlast a silence either.
            silent = time.monotonic() + self.heartbeat_timeout_s
            read = self._reader(stream, response, min(silent, ends))
            prefix = read(PREFIX.size)
            try:
                frame = read_frame(read, prefix)
            except ValueError as error:
                raise PeerDied(self.peer, name, f"{self.peer} answered '{name}' with no frame: {error}") from None
            if frame.kind == "result":
                return frame
            if frame.kind == "error":
                raise_error(frame.meta, self.peer, name)
            if frame.kind == "progress" and on_progress is not None:
                on_progress(frame.meta)
            if time.monotonic() >= ends:
                raise self._timeout(name, ends, deadline_s)

    def _reader(self, stream: socket.socket, response: http.client.HTTPResponse, until: float) -> Callable[[int], bytes]:
        def read_exactly(count: int) -> bytes:
            parts = bytearray()
            while len(parts) < count:
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                stream.settimeout(left)
                part = response.read1(min(count - len(parts), 2**20))
                if not part:
                    raise ConnectionResetError("the connection ended before the answer")
                parts += part
            return bytes(parts)

        return read_exactly

    def _timeout(self, name: str, ends: float, deadline_s: float) -> RpcTimeout:
        if time.monotonic() >= ends:
            return RpcTimeout(self.peer, name, f"{self.peer} is stuck in '{name}': no result within {deadline_s:g} s")
        silence = f"no sign of life for {self.heartbeat_timeout_s:g} s"
        return RpcTimeout(self.peer, name, f"{self.peer} is stuck in '{name}': {silence}")
