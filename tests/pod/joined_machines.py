"""A run and pods that join it from elsewhere on this machine, each with its own folder, through a real etcd."""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from etcd_server import WHY_SKIPPED, EtcdServer, program
from pod_runs import RECIPE, PodRun

from tandem.runtime.rpc.credentials import write_credential

CREDENTIAL = "c0" * 32
needs_etcd = pytest.mark.skipif(program() is None, reason=WHY_SKIPPED)


@dataclass
class Machines:
    """A run and pods that are started beside it, each with its own folder, which know of each other by etcd alone."""

    folder: Path
    etcd: EtcdServer
    settings: tuple[str, ...] = ()
    recipe: Path = RECIPE
    prefix: str = "/tandem"

    def __post_init__(self) -> None:
        write_credential(self.folder / "secret", CREDENTIAL)
        self.name = f"run-{time.time_ns()}"
        self.run = PodRun(self.folder / "run", name=self.name)
        self.pods = dict[str, PodRun]()

    @property
    def _common(self) -> list[str]:
        return [
            "--coordination.store=etcd", f"--coordination.endpoints=[{self.etcd.url}]", "--coordination.lease_s=3", "--pods.max_count=3",
            f"--pods.credential_file={self.folder / 'secret'}", f"--run.name={self.name}", "--cluster.preflight=false",
            *self.settings,
        ]  # fmt: skip

    def pod(self, name: str, *arguments: str) -> "subprocess.Popen[str]":
        pod = self.pods.setdefault(name, PodRun(self.folder / name))
        own = [f"--run.directory={pod.parent}", f"--name={name}", f"--folder={pod.parent / 'files'}"]
        return pod.begin("pod", str(self.recipe), *own, *self._common, *arguments)

    def train(self, *arguments: str) -> "subprocess.Popen[str]":
        return self.run.begin("train", str(self.recipe), f"--run.directory={self.run.parent}", *self._common, *arguments)

    def log(self, name: str, of: str = "rollout_shim") -> str:
        path = self.pods[name].parent / "files" / "logs" / f"{of}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, name: str, what: str, process: "subprocess.Popen[str] | None" = None) -> None:
        ends = time.monotonic() + 240
        while what not in self.log(name):
            assert time.monotonic() < ends and (process is None or process.poll() is None), (what, self.log(name))
            time.sleep(0.02)

    def members(self) -> list[tuple[str, str]]:
        """Returns what the journal has of pods, by what happened and the name."""
        return [(next(key for key in ("joined", "left", "refused") if key in event.detail), event.detail["name"]) for event in self.run.events("membership")]

    def left_behind(self) -> list[str]:
        return [*self.run.left_behind(), *(line for pod in self.pods.values() for line in pod.left_behind())]

    def close(self) -> None:
        for run in (self.run, *self.pods.values()):
            for pid in run.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def shim_of(pod: PodRun) -> int:
    return next(pid for pid, line in pod.processes().items() if "joining_shim" in line)
