"""A gateway and backends that fail on command, each in a process of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

LIMIT_S = 120.0
COMMAND = str(Path(sys.executable).with_name("tandem"))
QUICK = {
    "probes": {"interval_s": 0.1, "timeout_s": 1.0, "failures": 2},
    "breaker": {"open_s": 0.2, "max_open_s": 1.0},
    "retry": {"reserve": 1000},
}
"""Settings with which a gateway learns soon what has happened."""


def until(condition: Any, what: str, limit_s: float = LIMIT_S) -> None:
    ends = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends, f"waited {limit_s:g} s for {what}"
        time.sleep(0.02)


@dataclass
class Process:
    """A server in a process of its own."""

    process: "subprocess.Popen[bytes]"
    url: str
    client: httpx.Client

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(self.url + path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.client.post(self.url + path, json=body, **options)

    def complete(self, model: str = "m", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": model, "prompt": "x", **fields})


@dataclass
class FaultBackend(Process):
    name: str

    def mode(self, mode: str, **more: Any) -> None:
        assert self.post("/mode", {"mode": mode, **more}).status_code == 200

    def stats(self) -> Any:
        return self.get("/stats").json()

    def seen(self, what: str = "requests") -> int:
        return int(self.stats()["seen"].get(what, 0))


@dataclass
class Gateway(Process):
    log: Path

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum over all series of ``tandem_gateway_NAME`` that have ``labels``."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [line.rpartition(" ") for line in self.get("/metrics").text.splitlines()]
        return sum(float(value) for key, _, value in lines if key.partition("{")[0] == f"tandem_gateway_{name}" and all(label in key for label in wanted))

    def wait_ready(self, *backends: FaultBackend) -> None:
        until(lambda: all(self.metric("backend_ready", backend=backend.name) == 1 for backend in backends), "the backends to be ready")
        until(lambda: all(self.metric("backend_breaker_open", backend=backend.name) == 0 for backend in backends) or self.complete() is None, "closed breakers")

    def wait_idle(self) -> None:
        until(lambda: self.metric("in_flight_requests") == 0 and self.metric("outstanding_tokens") == 0, "the gateway to be idle")

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)


@contextlib.contextmanager
def fault_backend(name: str, models: str = "m", *weights: str) -> Iterator[FaultBackend]:
    command = [sys.executable, str(Path(__file__).with_name("fault_backend.py")), name, models, *weights]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process, httpx.Client(timeout=LIMIT_S) as client:
        try:
            assert process.stdout is not None
            yield FaultBackend(process, f"http://127.0.0.1:{int(process.stdout.readline())}", client, name)
        finally:
            process.kill()


@contextlib.contextmanager
def gateway(folder: Path, servers: Sequence[Process], **settings: Any) -> Iterator[Gateway]:
    """Runs ``tandem gateway`` before ``servers`` with ``settings``; kills it at the end if it still runs."""
    number = time.monotonic_ns()
    log, file = folder / f"gateway-{number}.log", folder / f"gateway-{number}.yaml"
    listed = [{"url": each.url, **({"name": each.name} if isinstance(each, FaultBackend) else {})} for each in servers]
    file.write_text(json.dumps({"backends": listed, "port": 0, **QUICK, **settings}))
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(log.open("wb"))
        process = subprocess.Popen([COMMAND, "gateway", str(file)], stdout=sink, stderr=sink, env={**os.environ, "OMP_NUM_THREADS": "1"})
        stack.callback(end, process)
        until(lambda: b"gateway at http://" in log.read_bytes() or process.poll() is not None, "the gateway's first line")
        assert process.poll() is None, log.read_text()
        address = log.read_text().split("gateway at http://")[1].split()[0]
        client = stack.enter_context(httpx.Client(timeout=LIMIT_S, limits=httpx.Limits(max_connections=None)))
        running = Gateway(process, f"http://{address}", client, log)
        yield running
        assert "Traceback" not in log.read_text() and "failed in the gateway" not in log.read_text(), log.read_text()


def end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
