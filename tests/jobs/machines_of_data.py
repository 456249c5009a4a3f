"""A run on data and the pods that train with it, each started by the command with a folder of its own, which know of each other by a real etcd alone."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etcd_server import EtcdServer

from tandem.runtime.records.journal import Event, Journal
from tandem.runtime.rpc.credentials import write_credential

MARK = "TANDEM_DATA_MACHINES_TEST"
_LIMIT_S = 240.0


@dataclass
class DataMachines:
    """The run of ``folder``/recipe.yaml, ``run``, with ``count`` pods that train. ``settings``: further overrides of all. ``inside``: the command that runs
    another one, by its name, on a machine of its own."""

    folder: Path
    etcd: EtcdServer
    count: int = 2
    settings: tuple[str, ...] = ()
    commands: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    inside: dict[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.prefix = f"/tandem-{self.mark}/"
        write_credential(self.folder / "secret", "d7" * 32)

    @property
    def common(self) -> list[str]:
        return [
            f"--parallel.data={self.count}", f"--pods.trainer_count={self.count}",
            f"--pods.credential_file={self.folder / 'secret'}",
            "--cluster.preflight=false", "--coordination.store=etcd", f"--coordination.endpoints=[{self.etcd.url}]",
            f"--coordination.prefix={self.prefix}", "--coordination.lease_s=3",
            "--pods.heartbeat_timeout_s=4", *self.settings,
        ]  # fmt: skip

    @property
    def directory(self) -> Path:
        return self.folder / "run"

    def begin(self, name: str, *arguments: str) -> "subprocess.Popen[bytes]":
        output = self.output(name)
        with output.open("ab") as file:
            self.commands[name] = subprocess.Popen(
                [*self.inside.get(name, ()), sys.executable, "-m", "tandem.cli.main", *arguments], cwd=self.folder, stdout=file, stderr=file,
                start_new_session=True, env={**os.environ, MARK: self.mark, f"{MARK}_OF": name},
            )  # fmt: skip
        return self.commands[name]

    def pod(self, name: str, *more: str) -> "subprocess.Popen[bytes]":
        own = [f"--name={name}", f"--folder={self.folder / 'pods' / name}"]
        return self.begin(name, "pod", "recipe.yaml", *own, *self.common, *more)

    def train(self, *more: str) -> "subprocess.Popen[bytes]":
        return self.begin("train", "train", "recipe.yaml", *self.common, *more)

    def resume(self, *more: str) -> "subprocess.Popen[bytes]":
        return self.begin("resume", "resume", str(self.directory), *more)

    def output(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    def ended(self, name: str, status: int = 0) -> str:
        """Waits for the end of command ``name``, which must exit with ``status`` and without a traceback, and returns what it said."""
        exit_status, said = self.commands[name].wait(_LIMIT_S), self.said(name)
        assert exit_status == status, said
        del self.commands[name]
        assert "Traceback" not in said
        return said

    def wait_for_step(self, step: int) -> None:
        rows, ends = self.directory / "metrics.jsonl", time.monotonic() + _LIMIT_S
        while not rows.exists() or len(rows.read_text().splitlines()) < step:
            assert time.monotonic() < ends and all(command.poll() is None for command in self.commands.values()), [*map(self.said, self.commands)]
            time.sleep(0.02)

    def wait_until_said(self, name: str, what: str) -> None:
        ends = time.monotonic() + _LIMIT_S
        while what not in self.said(name):
            assert time.monotonic() < ends and self.commands[name].poll() is None, self.said(name)
            time.sleep(0.02)

    def said(self, name: str) -> str:
        return self.output(name).read_text()

    def processes(self, name: str = "") -> dict[int, str]:
        """Returns the command lines of the processes of all commands, or of ``name``."""
        wanted, lines = f"{MARK}={self.mark}".encode(), {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment = (folder / "environ").read_bytes().split(b"\0")
                if wanted in environment and (not name or f"{MARK}_OF={name}".encode() in environment):
                    lines[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return lines

    def events(self, kind: str) -> list[Event]:
        with Journal(self.directory / "journal.sqlite", read_only=True) as journal:
            return [event for event in journal.events() if event.kind == kind]

    def left_behind(self) -> list[str]:
        """Returns what is still there after the run: processes, and files by which they meet."""
        ends = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < ends:
            time.sleep(0.05)
        return [*left.values(), *(str(path) for name in ("pod", "ranks") if (path := self.directory / name).exists())]

    def close(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for command in self.commands.values():
            command.wait()
