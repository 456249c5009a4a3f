"""``tandem up observability`` with the real programs, and what its Prometheus answers."""

import contextlib
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_processes import COMMAND, LIMIT_S, end, until

ALERTMANAGER = ("prometheus-alertmanager", "alertmanager")


def need_programs(alertmanager: bool = False) -> None:
    """Skips the test where Prometheus, or Alertmanager, is not installed."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (apt-get install prometheus), so nothing is asked of a real one")
    if alertmanager and not any(map(shutil.which, ALERTMANAGER)):
        pytest.skip("Alertmanager is not installed (apt-get install prometheus-alertmanager), so nobody is told of an alert")


@dataclass
class Observability:
    """The running command. ``url``: of its Prometheus; ``pids``: of what it started."""

    process: "subprocess.Popen[bytes]"
    url: str
    log: Path
    pids: list[int]

    def api(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30)
        body = answer.json()
        assert body["status"] == "success", (parameters, body)
        return body["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Returns the series that ``expr`` has now."""
        found: list[dict[str, Any]] = self.api("query", query=expr)["result"]
        return found

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.api("alerts")["alerts"] if alert["state"] == "firing"}

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)


@contextlib.contextmanager
def observability(folder: Path, targets: Path, *arguments: str) -> Iterator[Observability]:
    """Runs the command on free ports, with a scrape each second, until its Prometheus is ready; kills it at the end if it still runs."""
    log = folder / "up.log"
    given = ["up", "observability", "--folder", str(folder / "observability"), "--targets-folder", str(targets), "--port", "0", "--alertmanager-port", "0"]
    with log.open("wb") as sink:
        process = subprocess.Popen([COMMAND, *given, "--interval", "1", *arguments], stdout=sink, stderr=sink)
    try:
        until(lambda: b"name themselves in" in log.read_bytes() or process.poll() is not None, "Prometheus")
        assert process.poll() is None, log.read_text()
        found = re.search(r"Prometheus at (http://\S+)", log.read_text())
        assert found is not None, log.read_text()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield Observability(process, found[1], log, [int(pid) for pid in children])
    finally:
        end(process)
