"""A run of four pods, each on a machine of its own: one with the controller and the trainer, three that joined it, and etcd on a fifth."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etcd_server import EtcdServer
from network import Host, Network
from pod_runs import RECIPE, PodRun, finish
from wall_clock import WallClock

LEASE_S, HEARTBEAT_S = 3, 4
STEPS = 24
_DISK_MIB = 96
_LIMIT_S = 420.0


@dataclass
class FourPods:
    """Under ``folder``. The controller calls from the first address of its machine, and its trainer serves weights at the second one. ``disks``: small file
    systems of the run and of the pods. ``clock``: that of all processes. ``ends``: how the run's command ended before the run
    did."""

    folder: Path
    steps: int = STEPS
    settings: Sequence[str] = ()
    pods: dict[str, PodRun] = field(default_factory=dict)
    commands: dict[str, "subprocess.Popen[str]"] = field(default_factory=dict)
    ends: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.disks = {name: self.folder / name for name in ("run", "pods")}
        for disk in self.disks.values():
            disk.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "tmpfs", str(disk)], check=True)
        self.clock = WallClock(self.folder / "clock")
        self.network = Network()
        self.home, self.etcd_host = self.network.add("run", 1, 10), self.network.add("etcd", 2)
        self.hosts = {name: self.network.add(name, 11 + number) for number, name in enumerate(("p1", "p2", "p3"))}
        self.etcd = EtcdServer(self.folder / "etcd", host=self.etcd_host.address, inside=self.etcd_host.inside, options=("--unsafe-no-fsync",))
        self.secret = self.folder / "secret"
        self.secret.write_text("5e" * 32)
        self.secret.chmod(0o600)
        self.run = self._on(self.home, self.disks["run"])
        for name, host in self.hosts.items():
            self.pods[name] = self._on(host, self.disks["pods"] / name)

    def _on(self, host: Host, parent: Path) -> PodRun:
        return PodRun(parent, RECIPE, name="run", environment=self.clock.environment, inside=host.inside)

    def jump(self, seconds: float) -> None:
        """Sets the wall clocks of all processes ``seconds`` ahead of the right time."""
        self.clock.set(seconds)

    def _common(self, host: str) -> list[str]:
        return [
            "--coordination.store=etcd", f"--coordination.endpoints=[{self.etcd.url}]", f"--coordination.lease_s={LEASE_S}", "--pods.max_count=4",
            f"--pods.credential_file={self.secret}", f"--pods.heartbeat_timeout_s={HEARTBEAT_S}", "--watchdog.min_deadline_s=8", f"--pods.host={host}",
            "--cluster.preflight=false",
            "--run.name=run", f"--run.max_steps={self.steps}", "--run.max_restarts=1000", "--machine.call_deadline_s=60", *self.settings,
        ]  # fmt: skip

    def start(self) -> None:
        """Starts etcd, the pods and the run, which waits for three pods and goes on without the fourth."""
        self.etcd.start()
        for name in self.pods:
            self.start_pod(name)
        arguments = ["train", str(RECIPE), f"--run.directory={self.run.parent}", "--pods.min_count=3", *self._common(self.home.addresses[1])]
        self.commands["run"] = self.run.begin(*arguments)

    def start_pod(self, name: str) -> None:
        pod, host = self.pods[name], self.hosts[name]
        arguments = [f"--run.directory={pod.parent}", f"--name={name}", f"--folder={pod.parent}/files", *self._common(host.address)]
        self.commands[name] = pod.begin("pod", str(RECIPE), *arguments)

    def resume(self) -> None:
        self.commands["run"] = self.run.begin("resume", str(self.run.directory), "--pods.min_count=1")

    def rows(self) -> int:
        """Returns the number of steps that were taken."""
        path = self.run.directory / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def look_after(self) -> None:
        """Starts again what has ended, as a cluster's manager does: pods, etcd, and the run, by a resume."""
        if self.etcd.process is not None and self.etcd.process.poll() is not None:
            self.etcd.start()
        for name in self.pods:
            if self.commands[name].poll() is not None and not self.is_over:
                finish(self.commands[name])
                self.start_pod(name)
        if self.commands["run"].poll() in (None, 0):
            return
        done = finish(self.commands["run"])
        killed = [f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"]
        self.ends.append((done.stderr.strip().splitlines() or killed)[-1])
        self.resume()

    @property
    def is_over(self) -> bool:
        return self.commands["run"].poll() == 0

    def wait(self, limit_s: float = _LIMIT_S) -> None:
        """Waits until the run is over."""
        until = time.monotonic() + limit_s
        while not self.is_over:
            if time.monotonic() > until:
                raise TimeoutError(f"the run has not ended {limit_s:g} s after the last fault, and took {self.rows()} steps")
            self.look_after()
            time.sleep(0.1)

    def wait_for_step(self, step: int, limit_s: float = _LIMIT_S) -> None:
        until = time.monotonic() + limit_s
        while self.rows() < step and not self.is_over:
            assert time.monotonic() < until, f"step {step} did not come within {limit_s:g} s: {self.rows()} steps"
            self.look_after()
            time.sleep(0.02)

    def left_behind(self) -> list[str]:
        """Ends the pods that wait for another run, and returns the processes that remain."""
        for name in self.pods:
            if self.commands[name].poll() is None:
                self.commands[name].terminate()
        for pod in self.pods.values():
            # The shim or the agent may be what is asked first.
            pod.left_behind(15)
        return [line for run in (self.run, *self.pods.values()) for line in run.left_behind()]

    def close(self) -> None:
        for run in (self.run, *self.pods.values()):
            for pid in run.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for command in self.commands.values():
            command.communicate()
        self.etcd.kill()
        self.network.close()
        for disk in self.disks.values():
            subprocess.run(["umount", "-l", str(disk)], capture_output=True)
            shutil.rmtree(disk, ignore_errors=True)


def undisturbed_run(folder: Path, steps: int = STEPS, *settings: str) -> PodRun:
    """Returns the same run in one pod, without a network."""
    run = PodRun(folder, name="run")
    done = run.train(f"--run.max_steps={steps}", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return run
