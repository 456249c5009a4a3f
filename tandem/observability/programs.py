"""Finds, starts, watches and ends Prometheus and Alertmanager."""

import contextlib
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.runtime.exposition.targets import sweep
from tandem.runtime.process.processes import Threads, describe_exit, spawn, terminate
from tandem.types import RunError

READY_S = 60.0
SWEEP_S = 5.0
_LAST_WORDS = 300


@dataclass(frozen=True, slots=True)
class Program:
    """A program that is started if it is there. ``names``: what it may be called. ``package``: of Debian and Ubuntu."""

    title: str
    names: tuple[str, ...]
    package: str

    @property
    def path(self) -> str | None:
        """Where it is, ``None`` if it is not on the PATH."""
        return next((path for name in self.names if (path := shutil.which(name)) is not None), None)

    @property
    def how_to_install(self) -> str:
        return f"apt-get install {self.package}"


PROMETHEUS = Program("Prometheus", ("prometheus",), "prometheus")
ALERTMANAGER = Program("Alertmanager", ("prometheus-alertmanager", "alertmanager"), "prometheus-alertmanager")


def prometheus_arguments(folder: Path, port: int, retention: str) -> list[str]:
    """Returns the arguments of a Prometheus with the configuration in ``folder``, where it keeps its data too."""
    return [
        f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data' / 'prometheus'}", f"--storage.tsdb.retention.time={retention}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip


def alertmanager_arguments(folder: Path, port: int) -> list[str]:
    """Returns the arguments of an Alertmanager that is alone."""
    return [
        f"--config.file={folder / 'alertmanager.yml'}", f"--storage.path={folder / 'data' / 'alertmanager'}", "--cluster.listen-address=",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip


@dataclass
class Running:
    """A program that runs. ``log``: its output."""

    program: Program
    process: "subprocess.Popen[bytes]"
    url: str
    log: Path

    def check(self) -> None:
        """Raises ``RunError`` if it has ended."""
        status = self.process.poll()
        if status is not None:
            said = self.log.read_bytes()[-_LAST_WORDS:].decode("utf-8", "replace").strip().splitlines()
            raise RunError(f"{self.program.title} has ended ({describe_exit(status)}); the end of '{self.log}': {said[-1] if said else 'nothing'}")


@contextlib.contextmanager
def started(program: Program, arguments: Sequence[str], folder: Path, port: int) -> Iterator[Running]:
    """Runs ``program`` in a session of its own, until it answers that it is ready; ends it afterwards. Raises ``RunError`` if it ends or does not answer."""
    path = program.path
    assert path is not None, "only programs that are there are started"
    log = folder / "data" / f"{program.title.lower()}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    process = spawn(None, arguments, threads=Threads(1), program=path, new_session=True, output=log)
    running = Running(program, process, f"http://127.0.0.1:{port}", log)
    try:
        ends = time.monotonic() + READY_S
        while not _answers(f"{running.url}/-/ready"):
            running.check()
            if time.monotonic() > ends:
                raise RunError(f"{program.title} was not ready after {READY_S:g} s; see '{log}'")
            time.sleep(0.1)
        yield running
    finally:
        terminate(process)


def keep(running: Sequence[Running], targets_folder: Path, until: Callable[[], bool] = lambda: False) -> None:
    """Keeps the targets folder free of processes that are gone, until ``until`` or Ctrl-C. Raises ``RunError`` when a program ends."""
    swept = 0.0
    while not until():
        for each in running:
            each.check()
        if time.monotonic() - swept >= SWEEP_S:
            sweep(targets_folder)
            swept = time.monotonic()
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
