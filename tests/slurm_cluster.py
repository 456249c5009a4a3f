"""A real Slurm for tests: munged, slurmctld and several slurmd in a folder of their own, on free ports of this machine. Nothing of /etc/slurm is read."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etcd_server import free_ports

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
WHY_SKIPPED = "munged, slurmctld or slurmd is not installed (Debian: slurm-wlm, munge), or this is not root, so Slurm is NOT tested"


def is_installed() -> bool:
    """Returns whether a Slurm can run here. A slurmd starts jobs for users, so it is root's."""
    return os.geteuid() == 0 and all(shutil.which(name, path=PATH) for name in _DAEMONS)


def _here(*command: str) -> Sequence[str]:
    return command


@dataclass
class SlurmCluster:
    """Nodes ``n1``, ``n2``, ... in partition ``main``, each with ``cores``. ``small`` has the first node alone. ``addresses``: of each, and ``inside`` the
    functions that return the command that runs another one there; empty for this machine. ``address``: of this machine, which they reach. ``gpus``: of each
    node, which Slurm counts and which are not there; empty: none. ``spool``: the folder in which the nodes have their own files; ``None``: ``folder``."""

    folder: Path
    nodes: int = 2
    cores: int = 2
    address: str = "127.0.0.1"
    gpus: Sequence[int] = ()
    addresses: Sequence[str] = ()
    inside: "Sequence[Callable[..., Sequence[str]]]" = ()
    spool: Path | None = None
    processes: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}

    def start(self) -> "SlurmCluster":
        self.folder.mkdir(parents=True, exist_ok=True)
        # munged refuses a folder that others can write to, and Slurm one that its user cannot read.
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self._write_config()
        munge = {name: self.folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        self._run(
            "munged", "--foreground", "--force", "--key-file", str(key), "--socket", str(munge["socket"]), "--pid-file", str(munge["pid"]),
            "--log-file", str(munge["log"]), "--seed-file", str(munge["seed"]),
        )  # fmt: skip
        self._wait(lambda: munge["socket"].exists(), "munged")
        self._run("slurmctld", "-D", "-c")
        for name in self.names:
            self.start_node(name)
        self._wait(lambda: self.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split().count("idle") == self.nodes, "Slurm")
        return self

    def start_node(self, name: str) -> None:
        """Starts the daemon of a node, also again after it was killed."""
        self._run("slurmd", "-D", "-N", name, inside=self.inside[self.names.index(name)] if self.inside else _here)

    def daemon(self, name: str) -> "subprocess.Popen[bytes]":
        """Returns the newest daemon of a node."""
        return next(process for process in reversed(self.processes) if list(process.args[-2:]) == ["-N", name])  # type: ignore[index, arg-type]

    @property
    def names(self) -> list[str]:
        return [f"n{number + 1}" for number in range(self.nodes)]

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env={**os.environ, **self.environment}, capture_output=True, text=True)
        return done.stdout.strip()

    def clear(self) -> None:
        """Ends all jobs, and waits for their end."""
        ends = time.monotonic() + 60
        while jobs := self.ask("squeue", "-h", "-o", "%i").split():
            self.ask("scancel", *jobs)
            assert time.monotonic() < ends, jobs
            time.sleep(0.1)

    def stop(self) -> None:
        """Ends the daemons."""
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes.clear()

    def _run(self, program: str, *arguments: str, inside: "Callable[..., Sequence[str]]" = _here) -> None:
        binary = shutil.which(program, path=PATH)
        assert binary is not None
        with (self.folder / "daemons.out").open("ab") as log:
            self.processes.append(subprocess.Popen(inside(binary, *arguments), env={**os.environ, **self.environment}, stdout=log, stderr=log, cwd=self.folder))

    def _wait(self, is_ready: "object", what: str) -> None:
        ends = time.monotonic() + 60
        while not is_ready():  # type: ignore[operator]
            assert time.monotonic() < ends, f"{what} did not start: {(self.folder / 'daemons.out').read_text()[-3000:]}"
            time.sleep(0.05)

    def _write_config(self) -> None:
        host, folder, ports = socket.gethostname().split(".")[0], self.folder, free_ports(self.nodes + 1)
        spool = self.spool or folder
        for path in (folder / "state", *(spool / f"spool-{node}" for node in self.names)):
            path.mkdir(parents=True, exist_ok=True)
        addresses = self.addresses or ["127.0.0.1"] * self.nodes
        gpus = [f" Gres=gpu:{count}" if count else "" for count in self.gpus or [0] * self.nodes]
        nodes = [
            f"NodeName={name} NodeAddr={address} NodeHostname={host} Port={port} CPUs={self.cores} RealMemory=1000{gres}"
            for name, address, port, gres in zip(self.names, addresses, ports[1:], gpus, strict=True)
        ]
        devices = {name: [folder / f"gpu-{name}-{number}" for number in range(count)] for name, count in zip(self.names, self.gpus, strict=False)}
        counted = [f"NodeName={name} Name=gpu File={path}" for name, paths in devices.items() for path in paths]
        for path in (each for paths in devices.values() for each in paths):
            path.touch()
        (folder / "gres.conf").write_text("\n".join([*counted, ""]))
        (folder / "slurm.conf").write_text("\n".join([
            "ClusterName=test", f"SlurmctldHost={host}({self.address})", "SlurmUser=root", "SlurmdUser=root",
            # A job that is queued again may start when its credential has expired.
            "AuthType=auth/munge", f"AuthInfo=socket={folder}/munge.socket,cred_expire=5", "CredType=cred/munge",
            f"SlurmctldPort={ports[0]}", f"SlurmctldPidFile={folder}/slurmctld.pid", f"SlurmdPidFile={folder}/slurmd-%n.pid",
            f"SlurmdSpoolDir={spool}/spool-%n", f"StateSaveLocation={folder}/state",
            f"SlurmctldLogFile={folder}/slurmctld.log", f"SlurmdLogFile={folder}/slurmd-%n.log",
            # cgroups belong to the machine.
            "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "JobAcctGatherType=jobacct_gather/none", "SwitchType=switch/none", "MpiDefault=none",
            "SlurmdTimeout=15", "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core", "SlurmdParameters=config_overrides", "ReturnToService=2",
            "SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,sched_interval=1,bf_interval=1",
            *(["GresTypes=gpu"] if counted else []),
            "MailProg=/bin/true", "KillWait=5", "AccountingStorageType=accounting_storage/none", "JobCompType=jobcomp/none",
            *nodes,
            f"PartitionName=main Nodes={','.join(self.names)} Default=YES MaxTime=60 State=UP",
            f"PartitionName=small Nodes={self.names[0]} MaxTime=60 State=UP",
            f"PartitionName=closed Nodes={self.names[0]} State=DOWN", "",
        ]))  # fmt: skip
