"""A Ray cluster for one job of a run, on this machine: ``python -m tandem.cluster.launch.ray.own_cluster RUN JOB NODES GPUS``.

A head without cores of its own and NODES nodes of one core and GPUS GPUs each. This process owns them: the kernel ends them with it. It starts nodes that die
again, and ends when the job has ended or, before the job is placed, when the command that started it has: that holds this process's standard input, and
writes a line to it in the end. Nothing in it is kept.
"""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tandem.cluster.launch.ended import read_end
from tandem.cluster.launch.ray.commands import RayAt
from tandem.cluster.launch.ray.environment import OWN_CLUSTER, ray_environment
from tandem.cluster.launch.record import FOLDER, read_record
from tandem.runtime.machine.gpus import visible_gpus
from tandem.runtime.process.backoff import Backoff
from tandem.runtime.process.processes import UNBUFFERED, Threads, describe_exit, spawn, terminate
from tandem.runtime.process.temporary import choose_temporary_folder, temporary_folder
from tandem.runtime.records.logs import setup
from tandem.runtime.rpc.credentials import new_credential, write_credential
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)

TOKEN, _ADDRESS, _PROCESS = "ray.token", "ray.address", "ray.process"
_OBJECT_STORE_BYTES = 80 * 2**20
"""Nearly the least that Ray takes: no tensor of a run goes through it."""
_START_S, _LOOK_S, _END_S = 120.0, 0.2, 5.0
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Starting:
    """The process of a cluster that has been started. ``at``: the cluster."""

    process: "subprocess.Popen[bytes]"
    at: RayAt

    def keep(self) -> None:
        """Lets the cluster live until its job has ended, from here on without this process."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"placed\n")
        self.process.stdin.close()

    def end(self) -> None:
        terminate(self.process, 2 * _END_S)


def start_cluster(directory: Path, job: str, nodes: int, gpus: int) -> Starting:
    """Returns a new cluster for ``job`` of the run in ``directory``. Raises ``RunError`` if it does not start. The caller ends or keeps it."""
    for name in (_ADDRESS, _PROCESS):
        (directory / FOLDER / name).unlink(missing_ok=True)
    log = directory / "logs" / "ray.log"
    command = [sys.executable, "-m", "tandem.cluster.launch.ray.own_cluster", str(directory), job, str(nodes), str(gpus)]
    with log.open("ab") as output:
        # Not by `spawn`, whose children end with this process.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True, env={**os.environ, **UNBUFFERED, **Threads(1).environment()}
        )
    ends = time.monotonic() + _START_S
    try:
        while not (address := own_address_of(directory)):
            if process.poll() is not None or time.monotonic() > ends:
                why = describe_exit(process.poll()) if process.poll() is not None else f"no answer within {_START_S:.0f} s"
                raise RunError(f"Ray did not start on this machine ({why}){_last_words(log)}")
            time.sleep(0.05)
    except BaseException:
        terminate(process, 2 * _END_S)
        raise
    return Starting(process, RayAt(address, directory / FOLDER / TOKEN))


def own_address_of(directory: Path) -> str:
    """Returns the address of the cluster of the run in ``directory``; empty without one."""
    try:
        return (directory / FOLDER / _ADDRESS).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if "Error" in line or line.startswith("tandem: ")]
    return f": {lines[-1].removeprefix('tandem: ')[:300]}" if lines else ""


class _Cluster:
    """The processes of the cluster, whose files are in ``folder``."""

    def __init__(self, directory: Path, folder: Path, gpus: int) -> None:
        self._directory, self._folder, self._gpus = directory, folder, gpus
        self._environment = {**ray_environment(directory / FOLDER / TOKEN), **OWN_CLUSTER}
        self._head: subprocess.Popen[bytes] | None = None
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._backoff, self._begins_s = Backoff(), dict[str, float]()
        self.address = ""

    def start(self, nodes: int) -> None:
        """Starts the head and begins to start the nodes. Raises ``RunError`` if the head does not start."""
        for left in reversed(range(_TRIES)):
            port = _free_port()
            self.address = f"{_host()}:{port}"
            arguments = ["--head", f"--port={port}", "--num-cpus=0", "--num-gpus=0", "--include-dashboard=false", "--no-monitor"]
            # Of Ray's client, which is started where grpcio is installed, at a port that is taken by any other cluster.
            arguments.append(f"--ray-client-server-port={_free_port()}")
            self._head = self._start_node("head", arguments)
            ends = time.monotonic() + _START_S / 2
            while self._head.poll() is None and time.monotonic() < ends:
                if _listens(self.address):
                    for number in range(nodes):
                        self._begins_s[f"node-{number + 1}"] = 0.0
                    return
                time.sleep(0.05)
            terminate(self._head, _END_S)
            if not left:
                raise RunError(f"Ray's head node did not start ({describe_exit(self._head.poll())})")

    def supervise(self) -> bool:
        """Starts the nodes that are not there. Returns whether the head is."""
        assert self._head is not None
        for name, process in list(self._nodes.items()):
            if (status := process.poll()) is not None:
                wait_s = self._backoff.wait_s(int(time.monotonic() // 60))
                logger.info("%s ended (%s); it starts again in %g s", name, describe_exit(status), wait_s)
                del self._nodes[name]
                self._begins_s[name] = time.monotonic() + wait_s
        for name, begins_s in list(self._begins_s.items()):
            if time.monotonic() >= begins_s:
                del self._begins_s[name]
                number = int(name.rpartition("-")[2]) - 1
                gpus = visible_gpus(number * self._gpus, self._gpus) if self._gpus else {}
                self._nodes[name] = self._start_node(name, [f"--address={self.address}", "--num-cpus=1", f"--num-gpus={self._gpus}"], gpus)
                (self._directory / FOLDER / _PROCESS).write_text("".join(f"{each} {at.pid}\n" for each, at in sorted(self._nodes.items())), encoding="ascii")
        return self._head.poll() is None

    def end(self) -> None:
        processes = [*self._nodes.values(), *([self._head] if self._head is not None else [])]
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            terminate(process, _END_S)

    def _start_node(self, name: str, arguments: list[str], more: dict[str, str] | None = None) -> "subprocess.Popen[bytes]":
        common = [
            "start", "--block", f"--node-name={name}", f"--object-store-memory={_OBJECT_STORE_BYTES}", "--min-worker-port=0", "--max-worker-port=0",
            "--dashboard-agent-listen-port=0", "--include-log-monitor=false", "--disable-usage-stats", "--log-style=record", "--log-color=false",
            # Of its own: in one folder, nodes that start at the same time choose the same names for their sockets, and all but one abort.
            f"--temp-dir={self._folder / name.removeprefix('node-')}",
        ]  # fmt: skip
        output = self._directory / "logs" / "ray.log"
        environment = {**self._environment, **(more or {})}
        return spawn("ray.scripts.scripts", [*common, *arguments], threads=Threads(1), new_session=True, output=output, environment=environment)


def node_processes(directory: Path) -> dict[str, int]:
    """Returns the process of each node of a run's own cluster by its name; the end of the process is that of the node."""
    lines = (directory / FOLDER / _PROCESS).read_text(encoding="ascii").splitlines()
    return {name: int(pid) for name, _, pid in (line.partition(" ") for line in lines)}


def _host() -> str:
    """Returns the address that Ray takes for this machine's."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1):
            return True
    except OSError:
        return False


def _is_wanted(directory: Path, job: str) -> bool:
    try:
        record = read_record(directory)
    except (UserError, RunError):
        return False
    return record is not None and record.job == job and read_end(directory, job) is None


def main() -> int:
    directory, job, nodes, gpus = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    ends = False

    def end(*_: object) -> None:
        nonlocal ends
        ends = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    setup("ray_cluster", directory / "logs")
    # In a folder of its own, which is short: the names of sockets are bounded.
    choose_temporary_folder()
    write_credential(directory / FOLDER / TOKEN, new_credential())
    is_placed = False
    with temporary_folder(prefix="tandem-ray") as folder:
        cluster = _Cluster(directory, folder, gpus)
        try:
            cluster.start(nodes)
            fresh = directory / FOLDER / f"{_ADDRESS}.tmp"
            fresh.write_text(cluster.address, encoding="ascii")
            fresh.replace(directory / FOLDER / _ADDRESS)
            while not ends and cluster.supervise():
                if not is_placed and select.select([sys.stdin], [], [], 0)[0]:
                    if not sys.stdin.readline():
                        break
                    is_placed = True
                if is_placed and not _is_wanted(directory, job):
                    break
                time.sleep(_LOOK_S)
        except RunError as error:
            print(f"tandem: {error}", flush=True)
            return error.exit_code
        finally:
            cluster.end()
            if own_address_of(directory) == cluster.address:
                (directory / FOLDER / _ADDRESS).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
