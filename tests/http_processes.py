"""HTTP servers in processes of their own: how tests start, ask and end them."""

import contextlib
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

LIMIT_S = 120.0
COMMAND = str(Path(sys.executable).with_name("tandem"))


def until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> None:
    ends = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends, f"waited {limit_s:g} s for {what}"
        time.sleep(0.02)


@dataclass
class HttpProcess:
    """A server in a process of its own."""

    process: "subprocess.Popen[bytes]"
    url: str
    client: httpx.Client

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(self.url + path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.client.post(self.url + path, json=body, **options)

    def series(self, name: str, **labels: str) -> float:
        """Returns the sum over all series of the metric ``name`` that have ``labels``."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [line.rpartition(" ") for line in self.get("/metrics").text.splitlines()]
        return sum(float(value) for key, _, value in lines if key.partition("{")[0] == name and all(label in key for label in wanted))

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)


@dataclass
class LoggedProcess(HttpProcess):
    """A command of Tandem that serves. ``log``: its output."""

    log: Path


@contextlib.contextmanager
def serving_command(
    arguments: Sequence[str], log: Path, says: str, scheme: str = "http", within: Sequence[str] = (), verify: ssl.SSLContext | bool = True
) -> Iterator[tuple["subprocess.Popen[bytes]", str, httpx.Client]]:
    """Runs ``tandem ARGUMENTS`` until it writes ``says`` and its address; gives the process, its URL and a client. Kills it at the end if it still runs.
    ``within``: a command that is given ``tandem`` and its arguments to run. ``verify``: how the client shakes hands over TLS."""
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(log.open("wb"))
        process = subprocess.Popen([*within, COMMAND, *arguments], stdout=sink, stderr=sink, env={**os.environ, "OMP_NUM_THREADS": "1"})
        stack.callback(end, process)
        until(lambda: f"{says}{scheme}://".encode() in log.read_bytes() or process.poll() is not None, "the first line")
        assert process.poll() is None, log.read_text()
        address = log.read_text().split(f"{says}{scheme}://")[1].split()[0]
        client = stack.enter_context(httpx.Client(verify=verify, timeout=LIMIT_S, limits=httpx.Limits(max_connections=None)))
        yield process, f"{scheme}://{address}", client


def end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
