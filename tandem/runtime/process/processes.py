"""Starts, watches and ends processes. The only place that sets thread counts, spin limits and the environment."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Protocol

from tandem.config.machine import MachineConfig


@dataclass(frozen=True, slots=True)
class Threads:
    """How a process uses the cores. ``count``: threads of one parallel region. ``spin_count``: iterations for which an idle OpenMP thread
    spins before it sleeps. With OpenMP's default, two threads beside one busy process were measured three times slower than one thread; 1000
    keeps the speed on idle cores and loses little on busy ones."""

    count: int = 1
    spin_count: int = 1000

    def environment(self) -> dict[str, str]:
        """Returns the variables that OpenMP, MKL, OpenBLAS and tokenizers read when they are loaded."""
        count = str(self.count)
        return {
            "OMP_NUM_THREADS": count,
            "MKL_NUM_THREADS": count,
            "OPENBLAS_NUM_THREADS": count,
            "OMP_DYNAMIC": "FALSE",
            "MKL_DYNAMIC": "FALSE",
            "GOMP_SPINCOUNT": str(self.spin_count),
            "KMP_BLOCKTIME": "0",
            "TOKENIZERS_PARALLELISM": "false",
        }


class ChildProcess(Protocol):
    """A process that this one has started, itself (``subprocess.Popen``) or by a fork server."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...
    def terminate(self) -> None: ...


UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""Makes the output of a killed child complete."""


def available_cores() -> int:
    """Returns the number of cores that this process may use: its affinity and its cgroup's quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return max(1, cores)


def threads_of(machine: MachineConfig, at_once: int = 1) -> int:
    """Returns the threads of each worker: as configured, or the cores that this process may use, which as many workers as work ``at_once`` divide."""
    return machine.threads or max(1, available_cores() // at_once)


def spawn(
    module: str | None,
    arguments: Sequence[str] = (),
    *,
    threads: Threads,
    program: str | None = None,
    new_session: bool = False,
    pass_fds: Sequence[int] = (),
    worker: bool = False,
    stdin: int | IO[bytes] | None = subprocess.DEVNULL,
    output: Path | None = None,
    capture: bool = False,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    python: Path | None = None,
) -> "subprocess.Popen[bytes]":
    """Starts the Python module ``module`` (or ``program``) as a child that is killed when this process ends, even by ``kill -9``.

    ``output``: a file to which standard output and error are appended (``None``: those of this process). ``capture``: standard output is
    read from ``.stdout`` instead. ``new_session``: gives the child a session and process group of its own, so that ``kill_group`` also kills
    what it starts and a terminal's Ctrl-C does not reach it. ``worker``: the module calls ``worker.serve``, before which it collects no garbage.
    ``python``: the interpreter of another environment, which finds this package in the ``PYTHONPATH`` of ``environment``.
    """
    kind, target = ("worker" if worker else "module", module) if module is not None else ("exec", program)
    assert target is not None, "spawn needs a module or a program"
    command = [sys.executable if python is None else str(python), "-m", "tandem.runtime.process.child", str(os.getpid()), kind, target, *arguments]

    def start() -> "subprocess.Popen[bytes]":
        with contextlib.ExitStack() as stack:
            sink = stack.enter_context(output.open("ab")) if output is not None else None
            return subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.PIPE if capture else sink,
                stderr=sink,
                pass_fds=tuple(pass_fds),
                start_new_session=new_session,
                cwd=directory,
                env={**os.environ, **UNBUFFERED, **threads.environment(), **(environment or {})},
            )

    # The kernel sends the parent-death signal when the *thread* that forked ends, so a child is never started from a
    # thread that serves one request.
    if threading.current_thread() is threading.main_thread():
        return start()
    return _spawner().submit(start).result()


@cache
def _spawner() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawner")


def wait(process: ChildProcess, deadline_s: float) -> int | None:
    """Returns the exit status (negative: the signal), or ``None`` if the process still runs after ``deadline_s``."""
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        return None


def terminate(process: ChildProcess, grace_s: float = 5.0) -> int:
    """Sends SIGTERM to a running process and kills it after ``grace_s``. Returns the exit status."""
    if process.poll() is None:
        process.terminate()
        if wait(process, grace_s) is None:
            process.kill()
    return process.wait()


def kill(process: ChildProcess) -> int:
    """Kills a running process (SIGKILL). Returns the exit status."""
    if process.poll() is None:
        process.kill()
    return process.wait()


def kill_group(process: ChildProcess) -> int:
    """Kills everything in the session of ``process``, which was started with ``new_session=True``. Returns its exit status."""
    # The process is reaped last: until then the kernel cannot reuse its id, which is that of the group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process.returncode is None and os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
    return kill(process)


def describe_exit(status: int | None) -> str:
    """Returns ``exit status 3`` or ``killed by SIGKILL``."""
    if status is None:
        return "still running"
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Resident bytes. ``rss_bytes``: all pages; ``shm_bytes``: those of shared memory among them, which other processes may hold too; ``anonymous_bytes``:
    those of the process alone."""

    rss_bytes: int = 0
    shm_bytes: int = 0
    anonymous_bytes: int = 0


def peak_memory_of(pid: int) -> int:
    """Returns the most resident bytes that a process has had (``VmHWM``). Raises ``ProcessLookupError`` where it has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    raise ProcessLookupError(f"process {pid} has ended")


def memory_of(pid: int) -> ProcessMemory:
    """Returns the memory of a process now. Raises ``ProcessLookupError`` if it has ended."""
    kilobytes = {"RssAnon": 0, "RssFile": 0, "RssShmem": 0}
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().decode("utf-8", "replace").splitlines()
        for line in lines:
            name, _, rest = line.partition(":")
            if name in kilobytes:
                kilobytes[name] = int(rest.split()[0])
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"process {pid} has ended") from None
    return ProcessMemory(1024 * sum(kilobytes.values()), 1024 * kilobytes["RssShmem"], 1024 * kilobytes["RssAnon"])


def memory_of_tree(pid: int) -> ProcessMemory:
    """Returns the memory of a process and of all that it started, together; zeros if it has ended."""
    rss_bytes = shm_bytes = anonymous_bytes = 0
    for each in process_tree(pid):
        with contextlib.suppress(ProcessLookupError):
            memory = memory_of(each)
            rss_bytes, shm_bytes = rss_bytes + memory.rss_bytes, shm_bytes + memory.shm_bytes
            anonymous_bytes += memory.anonymous_bytes
    return ProcessMemory(rss_bytes, shm_bytes, anonymous_bytes)


def process_tree(pid: int) -> Iterator[int]:
    """Yields a process, if it lives, and all that it started."""
    try:
        with os.scandir(f"/proc/{pid}/task") as entries:
            tasks = [entry.path for entry in entries]
    except (ProcessLookupError, FileNotFoundError):
        return
    yield pid
    for task in tasks:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            with open(f"{task}/children", "rb") as file:
                children = file.read().split()
            for child in children:
                yield from process_tree(int(child))
