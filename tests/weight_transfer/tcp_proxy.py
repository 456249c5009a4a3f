"""A TCP proxy inside the test's process that cuts, stalls or alters what a server sends through it."""

import contextlib
import socket
import threading
from collections.abc import Callable

Alter = Callable[[int, bytearray], bool]
"""(bytes that this connection's server sent before, the next ones) -> whether the connection goes on behind them. May change the bytes, and may wait."""


class TcpProxy:
    """Passes connections on to ``port``. ``alter`` makes a fault for each connection, which is called with what its server sends."""

    def __init__(self, port: int, alter: Callable[[], Alter]) -> None:
        self._target, self._alter = port, alter
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                self.connections += 1
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.close()
                    continue
                for source, target, alter in ((client, server, None), (server, client, self._alter())):
                    threading.Thread(target=_pass_on, args=(source, target, alter), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket, alter: Alter | None) -> None:
    sent = 0
    with contextlib.suppress(OSError):
        while block := bytearray(source.recv(2**16)):
            goes_on = alter is None or alter(sent, block)
            target.sendall(block)
            sent += len(block)
            if not goes_on:
                break
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
