"""The channel between a shim and its worker: a socket pair that the worker inherits. One call at a time.

The shim owns the worker's life. When the worker ends, by itself, by a signal or by the kernel's out-of-memory killer,
the call that waits for it raises ``WorkerDied`` at once with how it ended; a worker that is stuck past a call's
deadline is made to write where it stands to its log and is killed.
"""

import contextlib
import faulthandler
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tandem.runtime.calls import (
    Blobs,
    Meta,
    Method,
    Progress,
    RpcTimeout,
    StepPoints,
    WorkerDied,
    error_meta,
    raise_error,
    read_frame,
)  # fmt: skip
from tandem.runtime.faults import FaultPoint, no_fault
from tandem.runtime.processes import Threads, describe_exit, kill, spawn, wait
from tandem.types.errors import UserError
from tandem.types.wire import PREFIX, Frame, encode

logger = logging.getLogger(__name__)

_POLL_S = 0.5
A = TypeVar("A")
R = TypeVar("R")


class Worker:
    """A running worker process, from the shim's side. Any thread may call; calls are served in turn."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str] = (),
        *,
        threads: Threads,
        output: Path | None = None,
        environment: Mapping[str, str] | None = None,
        new_session: bool = False,
    ) -> None:
        """Start ``python -m module ARGUMENTS --channel FD``, a process that calls ``serve`` on that descriptor. ``new_session``: see ``spawn``."""
        self.name = name
        ours, theirs = socket.socketpair()
        with theirs:
            channel = ("--channel", str(theirs.fileno()))
            self.process: subprocess.Popen[bytes] = spawn(
                module, [*arguments, *channel], threads=threads, output=output, environment=environment,
                pass_fds=[theirs.fileno()], new_session=new_session,
            )  # fmt: skip
        self._socket = ours
        self._lock = threading.Lock()
        self._broken = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return not self._broken and self.process.poll() is None

    def call(
        self,
        name: str,
        meta: Meta | None = None,
        blobs: Blobs | None = None,
        *,
        deadline_s: float,
        on_progress: Progress | None = None,
    ) -> Frame:
        """The result of the call ``name``. Raises ``WorkerDied``, ``RpcTimeout`` (and the worker is gone then) and what
        the method raised, as ``tandem.runtime.rpc`` does."""
        ends = time.monotonic() + deadline_s
        with self._lock:
            if self._broken:
                raise WorkerDied(self.name, name, self._broken)
            try:
                return self._call(name, meta or {}, blobs, ends, on_progress)
            except TimeoutError:
                where = self._kill_stuck()
                text = f"{self.name} was stuck in '{name}': no result within {deadline_s:g} s; it was killed ({where})"
                self._broken = text
                raise RpcTimeout(self.name, name, text) from None
            except (OSError, EOFError):
                raise WorkerDied(self.name, name, self._bury(f"while '{name}' ran")) from None

    def _call(self, name: str, meta: Meta, blobs: Blobs | None, ends: float, on_progress: Progress | None) -> Frame:
        def read_exactly(count: int) -> bytes:
            parts = bytearray()
            while len(parts) < count:
                part = self._patiently(ends, self._socket.recv, min(count - len(parts), 2**20))
                if not part:
                    raise EOFError
                parts += part
            return bytes(parts)

        request = memoryview(encode({"name": name, "meta": dict(meta)}, blobs, "call"))
        while request:
            request = request[self._patiently(ends, self._socket.send, request) :]
        while True:
            try:
                frame = read_frame(read_exactly, read_exactly(PREFIX.size))
            except ValueError as error:
                logger.error("%s answered '%s' with no frame: %s", self.name, name, error)
                kill(self.process)
                raise EOFError from None
            if frame.kind == "result":
                return frame
            if frame.kind == "error":
                raise_error(frame.meta, self.name, name)
            if frame.kind == "progress" and on_progress is not None:
                on_progress(frame.meta)

    def _patiently(self, ends: float, operation: Callable[[A], R], argument: A) -> R:
        """The socket's ``operation``, until it moves something, the deadline passes or the worker is seen to be
        dead."""
        while True:
            left = ends - time.monotonic()
            if left <= 0:
                raise TimeoutError
            # A process that the worker left behind may hold the socket open, so the worker's end is looked at as well.
            dead = self.process.poll() is not None
            self._socket.settimeout(0.01 if dead else min(left, _POLL_S))
            try:
                return operation(argument)
            except TimeoutError:
                if dead:
                    raise EOFError from None

    def _kill_stuck(self) -> str:
        # The worker's fault handler answers SIGABRT with the Python stack of every thread, into its log.
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGABRT)
        if wait(self.process, 2.0) is None:
            kill(self.process)
            return "its stack could not be had"
        return "its stack is in its log"

    def _bury(self, when: str) -> str:
        """How it ended, after making sure that it has."""
        status = wait(self.process, 2.0)
        if status is None:
            status = kill(self.process)
        self._broken = f"{self.name} died {when}: {describe_exit(status)}"
        if status == -signal.SIGKILL:
            self._broken += " (somebody's kill -9, or the kernel ran out of memory)"
        return self._broken

    def stop(self, grace_s: float = 5.0) -> int:
        """End it: close its channel, at which it ends by itself, or kill it after ``grace_s``. Returns the exit
        status."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        status = wait(self.process, grace_s)
        if status is None:
            status = kill(self.process)
        self._socket.close()
        self._broken = self._broken or f"{self.name} was stopped"
        return status


def serve(methods: Mapping[str, Method], channel: int, *, fault_point: FaultPoint = no_fault) -> None:
    """The worker's loop: answer calls from the descriptor ``channel`` until the shim closes it."""
    faulthandler.enable(sys.stderr)
    _no_core_files()
    points = StepPoints(fault_point)
    known = {name: points.around(name, method) for name, method in methods.items()}
    with socket.socket(fileno=channel) as shim:
        shim.set_inheritable(False)

        def read_exactly(count: int) -> bytes:
            parts = bytearray()
            while len(parts) < count:
                part = shim.recv(min(count - len(parts), 2**20))
                if not part:
                    raise EOFError
                parts += part
            return bytes(parts)

        def tell(progress: dict[str, Any]) -> None:
            part = encode(progress, kind="progress")
            try:
                shim.sendall(part)
            except OSError:
                raise _ShimGone from None

        while True:
            try:
                frame = read_frame(read_exactly, read_exactly(PREFIX.size))
                answer = _answer(known, frame, tell)
                shim.sendall(answer)
            except (EOFError, ConnectionError, _ShimGone):
                logger.info("the shim closed the channel")
                return


class _ShimGone(Exception):
    """A call's progress has nobody left to tell it to: the call ends."""


def _answer(methods: Mapping[str, Method], frame: Frame, progress: Progress) -> bytes:
    name = str(frame.meta.get("name"))
    try:
        if name not in methods:
            raise LookupError(f"this worker has no call '{name}'")
        meta, blobs = methods[name](frame.meta["meta"], frame.blobs, progress)
        return encode(meta, blobs, "result")
    except _ShimGone:
        raise
    except UserError as error:
        logger.error("'%s': %s", name, error)
        return encode(error_meta(error), kind="error")
    except Exception as error:
        logger.exception("'%s' failed", name)
        return encode(error_meta(error), kind="error")


def _no_core_files() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
