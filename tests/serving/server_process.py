"""A server in a process of its own, on a free port."""

import contextlib
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from http_processes import LoggedProcess, serving_command, until

CONTROL = {"Authorization": "Bearer control"}


@dataclass
class Server(LoggedProcess):
    """A running server."""

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
        return self.series(name, **labels)

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


@contextlib.contextmanager
def server(model: Path, folder: Path, *arguments: str, ready: bool = True, tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    """Runs ``tandem serve MODEL ARGUMENTS``; kills it at the end if it still runs. ``tls``: of the client of a server with a certificate."""
    log = folder / f"serve-{time.monotonic_ns()}.log"
    command = ["serve", str(model), "--port", "0", "--threads", "1", "--control-key", "control", *arguments]
    with serving_command(command, log, "", "http" if tls is None else "https", verify=True if tls is None else tls) as (process, url, client):
        running = Server(process, url, client, log)
        if ready:
            until(lambda: process.poll() is not None or running.get("/readiness").status_code == 200, "the server to be ready")
            assert process.poll() is None, log.read_text()
        yield running
