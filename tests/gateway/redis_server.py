"""A real Redis for tests."""

import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from http_processes import until

SERVER = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(SERVER is None, reason="there is no redis-server")


class Redis:
    """A Redis on a socket in a folder, which can be killed and started again with what it has saved."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._process = folder, None
        self.url = f"unix://{folder}/redis.sock"

    def start(self) -> None:
        assert SERVER is not None
        command = [SERVER, "--port", "0", "--unixsocket", "redis.sock", "--appendonly", "yes", "--appendfsync", "always", "--save", "", "--dir", "."]
        self._process = subprocess.Popen(command, cwd=self._folder, stdout=subprocess.DEVNULL)
        until(self._answers, "Redis")

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as one:
            try:
                one.connect(f"{self._folder}/redis.sock")
                one.sendall(b"PING\r\n")
                return one.recv(64) == b"+PONG\r\n"
            except OSError:
                return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
