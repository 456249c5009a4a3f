"""A real Ray of several raylets on this machine, each where the test wants it."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RAY = Path(sys.executable).with_name("ray")
SERVE_PACKAGES = ("ray", "fastapi", "uvicorn", "watchfiles", "aiohttp_cors", "grpc_reflection")
"""Without one of them ``ray[serve]`` is not installed, and ``ray.serve`` cannot be imported."""


@dataclass
class RayCluster:
    """A head without cores at ``host``, and nodes. ``environment``: of commands that use it."""

    host: str
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ray-")))
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.chmod(0o755)
        (self.folder / "token").write_text(secrets.token_hex(32))
        self.address = f"{self.host}:{self._free_port()}"

    @property
    def environment(self) -> dict[str, str]:
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"), "RAY_USAGE_STATS_ENABLED": "0"}

    def start(self) -> "RayCluster":
        # The head ends if the port of Ray's client is taken, which is the same one for all clusters.
        ports = [f"--port={self.address.rpartition(':')[2]}", f"--ray-client-server-port={self._free_port()}"]
        arguments = [*ports, "--head", "--num-cpus=0", "--include-dashboard=false", "--no-monitor"]
        self._start("head", arguments, self.host)
        self.wait_for("head")
        return self

    def wait_for(self, name: str) -> None:
        """Waits until the node has joined."""
        log, until = self.folder / f"{name}.log", time.monotonic() + 240
        while "Ray runtime started" not in (text := log.read_text()):
            assert self.processes[name].poll() is None and time.monotonic() < until, text
            time.sleep(0.1)

    def add(
        self, name: str, *options: str, host: str = "", environment: Mapping[str, str] | None = None,
        inside: Callable[..., Sequence[str]] = lambda *words: words,
    ) -> None:  # fmt: skip
        """Starts a node of one core, which has joined after a while."""
        self._start(name, [f"--address={self.address}", "--num-cpus=1", *options], host or self.host, environment, inside)

    def kill(self, name: str) -> None:
        self.processes.pop(name).kill()

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        subprocess.run(["rm", "-rf", str(self.folder)], check=True)

    def _free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind((self.host, 0))
            return int(probe.getsockname()[1])

    def _start(
        self, name: str, arguments: Sequence[str], host: str, environment: Mapping[str, str] | None = None,
        inside: Callable[..., Sequence[str]] = lambda *words: words,
    ) -> None:  # fmt: skip
        fast = {"RAY_health_check_initial_delay_ms": "2000", "RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "2000"}
        common = [
            "start", "--block", f"--node-name={name}", f"--node-ip-address={host}", "--num-gpus=0", "--object-store-memory=80000000", "--min-worker-port=0",
            "--max-worker-port=0", "--dashboard-agent-listen-port=0", "--include-log-monitor=false", f"--temp-dir={self.folder / name.rpartition('-')[2]}",
        ]  # fmt: skip
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                inside(str(RAY), *common, *arguments), env={**os.environ, **fast, **self.environment, **(environment or {})}, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip


def descendants(pid: int) -> list[int]:
    """Returns the ids of a process and of all that it has started."""
    found = [pid]
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += descendants(int(child))
    except OSError:
        pass
    return found


def pause(pid: int, seconds: float) -> None:
    """Stops a process and all that it has started for a while."""
    paused = descendants(pid)
    for each in paused:
        os.kill(each, signal.SIGSTOP)
    time.sleep(seconds)
    for each in paused:
        try:
            os.kill(each, signal.SIGCONT)
        except ProcessLookupError:
            continue
