"""A gateway and backends that fail on command, each in a process of its own."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_processes import LIMIT_S, HttpProcess, LoggedProcess, end, serving_command, until

from tandem.cli.main import main

QUICK = {
    "probes": {"interval_s": 0.1, "timeout_s": 1.0, "failures": 2},
    "breaker": {"open_s": 0.2, "max_open_s": 1.0},
    "retry": {"reserve": 1000},
}
"""Settings with which a gateway learns soon what has happened."""


@dataclass
class FaultBackend(HttpProcess):
    name: str

    def mode(self, mode: str, **more: Any) -> None:
        assert self.post("/mode", {"mode": mode, **more}).status_code == 200

    def stats(self) -> Any:
        return self.get("/stats").json()

    def seen(self, what: str = "requests") -> int:
        return int(self.stats()["seen"].get(what, 0))


@dataclass
class Gateway(LoggedProcess):
    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum over all series of ``tandem_gateway_NAME`` that have ``labels``."""
        return self.series(f"tandem_gateway_{name}", **labels)

    def complete(self, model: str = "m", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": model, "prompt": "x", **fields})

    def wait_ready(self, *backends: FaultBackend) -> None:
        until(lambda: all(self.metric("backend_ready", backend=backend.name) >= 1 for backend in backends), "the backends to be ready")
        until(lambda: all(self.metric("backend_breaker_open", backend=backend.name) == 0 for backend in backends) or self.complete() is None, "closed breakers")

    def wait_idle(self) -> None:
        until(lambda: self.metric("in_flight_requests") == 0 and self.metric("outstanding_tokens") == 0, "the gateway to be idle")


def refusal(settings: Mapping[str, Any], folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Returns the line with which ``tandem gateway FLAGS`` refuses a file of ``settings``, which need name no backend."""
    (folder / "gateway.yaml").write_text(json.dumps({"backends": ["http://127.0.0.1:9"], "port": 0, **settings}))
    assert main(["gateway", str(folder / "gateway.yaml"), *flags]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1, message
    return message


@contextlib.contextmanager
def fault_backend(name: str, models: str = "m", weights: str = "", at: tuple[str, int] = ("127.0.0.1", 0)) -> Iterator[FaultBackend]:
    """Runs ``fault_backend.py`` at an address and a port, by default a free one."""
    command = [sys.executable, str(Path(__file__).with_name("fault_backend.py")), name, models, weights, at[0], str(at[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process, httpx.Client(timeout=LIMIT_S) as client:
        try:
            assert process.stdout is not None
            yield FaultBackend(process, f"http://{at[0]}:{int(process.stdout.readline())}", client, name)
        finally:
            end(process)


@contextlib.contextmanager
def gateway(folder: Path, servers: Sequence[HttpProcess], within: Sequence[str] = (), **settings: Any) -> Iterator[Gateway]:
    """Runs ``tandem gateway`` before ``servers`` with ``settings``; kills it at the end if it still runs. ``within``: as for ``serving_command``."""
    number = time.monotonic_ns()
    log, file = folder / f"gateway-{number}.log", folder / f"gateway-{number}.yaml"
    listed = [{"url": each.url, **({"name": each.name} if isinstance(each, FaultBackend) else {})} for each in servers]
    file.write_text(json.dumps({"backends": listed, "port": 0, **QUICK, **settings}))
    with serving_command(["gateway", str(file)], log, "gateway at ", "https" if "tls" in settings else "http", within) as (process, url, client):
        yield Gateway(process, url, client, log)
        assert "Traceback" not in log.read_text() and "failed in the gateway" not in log.read_text(), log.read_text()
