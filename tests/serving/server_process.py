"""A server in a process of its own, on a free port."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

CONTROL = {"Authorization": "Bearer control"}
LIMIT_S = 120.0


@dataclass
class Server:
    """A running server. ``log``: its output."""

    process: "subprocess.Popen[bytes]"
    url: str
    log: Path
    client: httpx.Client

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(self.url + path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.client.post(self.url + path, json=body, **options)

    def control(self, path: str, body: Any = None) -> Any:
        response = self.post(path, body, headers=CONTROL)
        assert response.status_code == 200, response.text
        return response.json()

    def control_get(self, path: str) -> Any:
        response = self.get(path, headers=CONTROL)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, prompt: Any, **fields: Any) -> Any:
        response = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def complete_stream(self, prompt: Any, **fields: Any) -> str:
        response = self.post("/v1/completions", {"prompt": prompt, "stream": True, **fields})
        assert response.status_code == 200 and response.text.endswith("data: [DONE]\n\n"), response.text
        return response.text

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum over all series of a metric that have ``labels``."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [line.rpartition(" ") for line in self.get("/metrics").text.splitlines()]
        return sum(float(value) for key, _, value in lines if key.partition("{")[0] == name and all(label in key for label in wanted))

    def engines(self) -> list[int]:
        """Returns the process ids of its engines."""
        path = Path(f"/proc/{self.process.pid}/task")
        children = " ".join((task / "children").read_text() for task in path.iterdir())
        return [int(pid) for pid in children.split()]

    def files(self) -> int:
        """Returns the number of open files and sockets."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def wait_idle(self) -> None:
        """Waits until no request runs or waits and no block is held."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        until(lambda: all(self.metric(name) == 0 for name in names), "the server to be idle")

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)


def until(condition: Any, what: str, limit_s: float = LIMIT_S) -> None:
    ends = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends, f"waited {limit_s:g} s for {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def server(model: Path, folder: Path, *arguments: str, ready: bool = True) -> Iterator[Server]:
    """Runs ``tandem serve MODEL ARGUMENTS``; kills it at the end if it still runs."""
    log = folder / f"serve-{time.monotonic_ns()}.log"
    command = [str(Path(sys.executable).with_name("tandem")), "serve", str(model), "--port", "0", "--threads", "1", "--control-key", "control", *arguments]
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env={**os.environ, "OMP_NUM_THREADS": "1"})
        stack.callback(end, process)
        until(lambda: b"http://" in log.read_bytes() or process.poll() is not None, "the server's first line")
        assert process.poll() is None, log.read_text()
        address = log.read_text().split("http://")[1].split()[0]
        client = stack.enter_context(httpx.Client(timeout=LIMIT_S, limits=httpx.Limits(max_connections=None)))
        running = Server(process, f"http://{address}", log, client)
        if ready:
            until(lambda: process.poll() is not None or running.get("/readiness").status_code == 200, "the server to be ready")
            assert process.poll() is None, log.read_text()
        yield running


def end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
