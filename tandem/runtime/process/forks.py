"""The side of a fork server's owner, and of others that share it: starts worker processes whose modules are imported already."""

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.runtime.process.fork_server import MAX_REQUEST_BYTES, ROOM_BYTES
from tandem.runtime.process.processes import Threads, kill_group, spawn

logger = logging.getLogger(__name__)
IMPORT_S = 300.0
"""Seconds that a request may wait for the imports of the server."""
STATUS_S = 10.0
"""Seconds for the answer of a server that has nothing else to do."""
MODULE = "tandem.runtime.process.fork_server"


class NoFork(Exception):
    """The server does not fork: it has ended, or it would not be safe."""


class SharedForkServer:
    """A fork server of another process, asked over ``connection``, which it made with ``share``. Thread-safe. The workers that it forks for this process are
    killed when this process ends or closes the connection, and when the server ends."""

    def __init__(self, connection: socket.socket) -> None:
        connection.set_inheritable(False)
        self._socket, self._lock = connection, threading.Lock()

    @property
    def alive(self) -> bool:
        """Whether the server may still answer."""
        ending = select.poll()
        try:
            ending.register(self._socket, 0)
        except ValueError:  # It was closed.
            return False
        return not ending.poll(0)

    def start(
        self, module: str, arguments: Sequence[str], *, output: Path | None = None, environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (), new_session: bool = False,
    ) -> "ForkedProcess":  # fmt: skip
        """Starts ``module``, which has ``run(arguments)``, as ``spawn`` does with ``worker``. Waits for the server's imports. Raises ``NoFork``."""
        request = {
            "module": module, "arguments": list(arguments), "environment": dict(environment or {}), "numbers": list(pass_fds), "session": new_session
        }  # fmt: skip
        with contextlib.ExitStack() as stack:
            sink = 2 if output is None else stack.enter_context(output.open("ab")).fileno()
            reply, descriptors = self._ask(request, IMPORT_S, [sink, *pass_fds])
        if "trouble" in reply:
            raise NoFork(reply["trouble"])
        return ForkedProcess(int(reply["pid"]), descriptors[0], self)

    def status_of(self, pid: int) -> int | None:
        """Returns the exit status of a worker that has ended, as ``subprocess`` has it. If the server has ended too, the kernel has killed the worker."""
        try:
            reply, _ = self._ask({"ended": pid}, STATUS_S)
        except NoFork:
            return -signal.SIGKILL
        return reply["status"]  # type: ignore[no-any-return]

    def close(self) -> None:
        """Ends all that the server has started for this process."""
        self._socket.close()

    def _ask(self, request: Mapping[str, Any], within_s: float, descriptors: Sequence[int] = ()) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            try:
                self._socket.settimeout(within_s)
                socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
                data, received, _, _ = socket.recv_fds(self._socket, MAX_REQUEST_BYTES, 1)
            except OSError as error:
                # After a timeout the answer of this request would be taken for that of the next one.
                self.close()
                raise NoFork(f"it does not answer: {error}") from None
        if not data:
            raise NoFork("it has ended")
        return json.loads(data), received


class ForkServer(SharedForkServer):
    """A process that has imported ``modules`` and forks workers, which have the ``threads`` and, at their start, the ``environment`` that it has. It ends with
    this process, and all workers with it."""

    def __init__(self, modules: Sequence[str], *, threads: Threads, environment: Mapping[str, str] | None = None, output: Path | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Libraries of matrix products start their threads when they are imported; torch sets its own count later.
            own = {**(environment or {}), "OPENBLAS_NUM_THREADS": "1"}
            self._process = spawn(
                MODULE, ["--requests", str(theirs.fileno()), " " * ROOM_BYTES], threads=threads, output=output, environment=own,
                pass_fds=[theirs.fileno()], new_session=True, worker=True,
            )  # fmt: skip
        super().__init__(ours)
        ours.send(json.dumps({"modules": list(modules)}).encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def share(self) -> socket.socket:
        """Returns a connection for another process, to which it is passed on and which makes a ``SharedForkServer`` of it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Without an answer, for which this process would wait until the server has its imports. If it ends before, the connection ends too.
        with theirs, self._lock, contextlib.suppress(OSError):
            socket.send_fds(self._socket, [json.dumps({"shares": True}).encode()], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """Ends the server and all that it has started, for whomever."""
        super().close()
        kill_group(self._process)


class ForkedProcess:
    """A process that a fork server has started, with the methods of ``subprocess.Popen``."""

    def __init__(self, pid: int, pidfd: int, server: SharedForkServer) -> None:
        self.pid, self.returncode = pid, None  # type: tuple[int, int | None]
        self._pidfd, self._server, self._lock = pidfd, server, threading.Lock()

    def watch(self) -> int:
        """Returns a descriptor of the caller's own that becomes readable when the process ends."""
        return os.dup(self._pidfd)

    def poll(self) -> int | None:
        """Returns the exit status, ``None`` while the process runs."""
        with self._lock:
            if self.returncode is None and self._ended(0.0):
                self.returncode = self._server.status_of(self.pid)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status. Raises ``subprocess.TimeoutExpired``."""
        if self.returncode is None and not self._ended(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _ended(self, within_s: float | None) -> bool:
        ending = select.poll()
        ending.register(self._pidfd, select.POLLIN)
        return bool(ending.poll(None if within_s is None else max(0.0, within_s) * 1000))

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._pidfd)
