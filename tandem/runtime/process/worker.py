"""Worker processes: started by ``Worker``, called over a socket pair, and answering their calls with ``serve``.

``Worker`` owns the process. When the process ends, by itself, by a signal or by the kernel's out-of-memory killer, the call in progress
raises ``WorkerDied`` at once, with the exit status or signal. A worker that does not answer within a call's deadline writes the stack of
every thread to its log and is killed.
"""

import contextlib
import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.runtime.process.deadline import Deadline
from tandem.runtime.process.faults import FaultPoint, no_fault
from tandem.runtime.process.forks import NoFork, SharedForkServer
from tandem.runtime.process.processes import ChildProcess, Threads, describe_exit, kill, kill_group, spawn
from tandem.runtime.process.processes import wait as wait_for_exit
from tandem.runtime.process.waits import WAITS, StateOfPeer, Wait, unknown
from tandem.runtime.rpc.calls import Blobs, Meta, Method, Progress, RpcTimeout, WorkerDied, error_meta, is_result, with_fault_points
from tandem.runtime.rpc.channel import BrokenFrame, Channel
from tandem.runtime.rpc.traced import SpanSender, call_span, receive_spans
from tandem.types.errors import UserError
from tandem.types.wire import Frame

logger = logging.getLogger(__name__)


class Worker:
    """The owner's side of a running worker process. Thread-safe; calls are answered one after the other."""

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
        python: Path | None = None,
        state: StateOfPeer = unknown,
        pass_fds: Sequence[int] = (),
        forks: SharedForkServer | None = None,
    ) -> None:
        """Starts ``python -m MODULE ARGUMENTS --channel FD``, a process that calls ``serve`` with that descriptor.

        Args:
            name: the worker's name in error messages.
            new_session: start it in its own session, so that processes it starts are killed with it (see ``spawn``).
            python: the interpreter of another environment (see ``spawn``).
            state: see ``StateOfPeer``.
            pass_fds: further descriptors that it inherits.
            forks: forks it, if it can; ``MODULE`` has ``run(arguments)`` then.
        """
        self.name, self.state = name, state
        self._new_session = new_session
        ours, theirs = socket.socketpair()
        with theirs:
            own = [*arguments, "--channel", str(theirs.fileno())]
            descriptors = [theirs.fileno(), *pass_fds]
            forked = None
            if forks is not None:
                try:
                    forked = forks.start(module, own, output=output, environment=environment, pass_fds=descriptors, new_session=new_session)
                except NoFork as error:
                    logger.warning("%s is not forked: %s", name, error)
            self.process: ChildProcess = forked or spawn(
                module, own, threads=threads, output=output, environment=environment, pass_fds=descriptors, new_session=new_session, worker=True,
                python=python,
            )  # fmt: skip
        self._pidfd: int | None = None
        if forked is not None:
            self._pidfd = forked.watch()
        elif hasattr(os, "pidfd_open"):
            self._pidfd = os.pidfd_open(self.process.pid)
        self._channel = Channel(ours, watch=self._pidfd)
        self._lock = threading.Lock()
        self._broken = ""
        self._stopped = False
        self._calls = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return not self._broken and not self._ended(0.0)

    def call(
        self,
        name: str,
        meta: Meta | None = None,
        blobs: Blobs | None = None,
        *,
        deadline_s: float,
        on_progress: Progress | None = None,
    ) -> Frame:
        """Returns the result of the call ``name``.

        Raises:
            WorkerDied: the process ended; the text has its exit status or signal.
            RpcTimeout: no result within ``deadline_s``; the process was killed.
            UserError, RunError, CallError: as the method raised it.
            RemoteError: the method raised anything else.
        """
        deadline = Deadline(deadline_s)
        with self._lock, WAITS.wait(self.name, name, deadline_s, state_of_peer=self.state) as wait:
            if self._broken:
                raise WorkerDied(self.name, name, self._broken)
            try:
                return self._call(name, meta or {}, blobs, deadline, on_progress, wait)
            except TimeoutError:
                self._broken = f"{self.name} was stuck in '{name}': no result within {deadline_s:g} s; it was killed ({self._kill_stuck()})"
                raise RpcTimeout(self.name, name, self._broken) from None
            except (OSError, EOFError, BrokenFrame) as error:
                raise WorkerDied(self.name, name, self._bury(f"while '{name}' ran", error)) from None
            finally:
                if self._stopped:
                    self._close()

    def _call(self, name: str, meta: Meta, blobs: Blobs | None, deadline: Deadline, on_progress: Progress | None, wait: Wait) -> Frame:
        self._calls += 1
        with self._whole_frames():
            self._channel.send(meta, blobs, kind="call", method=name, call=self._calls, deadline=deadline)
        while True:
            with self._whole_frames():
                frame = self._channel.receive(deadline)
            if frame.call != self._calls:
                receive_spans(frame.spans)
                continue  # The answer to a call that was interrupted on this side.
            wait.heard(frame.meta, is_progress=frame.kind == "progress")
            if is_result(frame, self.name, name, on_progress):
                return frame

    @contextlib.contextmanager
    def _whole_frames(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            raise
        except BaseException:
            # The interrupt may have come in the middle of a frame, after which the next one cannot be found.
            self._channel.shutdown()
            raise

    def stop(self, grace_s: float = 5.0) -> int:
        """Stops the process: closes its channel, which makes ``serve`` return, and kills it after ``grace_s``. Returns the exit status. Another
        thread's call in progress raises ``WorkerDied``."""
        self._channel.shutdown()
        self._ended(grace_s)
        status = self._kill()
        self._broken = self._broken or f"{self.name} was stopped"
        self._stopped = True
        if self._lock.acquire(blocking=False):
            self._close()
            self._lock.release()
        return status

    def _ended(self, deadline_s: float) -> bool:
        """Returns whether the process ends within ``deadline_s``. Does not reap it, because ``_kill`` needs its id for the process group."""
        if self._pidfd is None or self.process.returncode is not None:
            return wait_for_exit(self.process, deadline_s) is not None
        ending = select.poll()
        ending.register(self._pidfd, select.POLLIN)
        return bool(ending.poll(max(0.0, deadline_s) * 1000))

    def _kill(self) -> int:
        return kill_group(self.process) if self._new_session else kill(self.process)

    def _kill_stuck(self) -> str:
        # On SIGABRT the worker's fault handler writes the Python stack of every thread to its log.
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGABRT)
        has_stack = self._ended(2.0)
        self._kill()
        return "its stack is in its log" if has_stack else "it wrote no stack"

    def _bury(self, when: str, error: Exception) -> str:
        """Ends the process if it still runs, and returns how it ended."""
        if not self._ended(2.0) and isinstance(error, BrokenFrame):
            self._kill()
            self._broken = f"{self.name} sent a broken frame {when} and was killed: {error}"
            return self._broken
        status = self._kill()
        self._broken = f"{self.name} died {when}: {describe_exit(status)}"
        if status == -signal.SIGKILL:
            self._broken += " (killed with kill -9, or by the kernel when memory ran out)"
        return self._broken

    def _close(self) -> None:
        self._channel.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def serve(methods: Mapping[str, Method], channel: int, *, fault_point: FaultPoint = no_fault, sends_spans: bool = False) -> None:
    """Answers calls from the descriptor ``channel``, one after the other, until the owner closes it. ``sends_spans``: those of a call are sent while it lasts,
    from a thread, and not with its answer alone."""
    dump_stack_on_abort()
    methods = with_fault_points(methods, fault_point)
    connection = socket.socket(fileno=channel)
    connection.set_inheritable(False)
    owner = Channel(connection)
    gc.enable()
    sender = SpanSender(owner) if sends_spans else None
    with contextlib.closing(owner):
        while True:
            try:
                frame = owner.receive()
                with contextlib.nullcontext() if sender is None else sender.during(frame.call):
                    _answer(owner, methods, frame)
            except (EOFError, OSError, BrokenFrame, _OwnerClosed):
                logger.info("the owner closed the channel")
                return


def end_of_imports() -> None:
    """Leaves what exists, modules above all, out of all later collections. A worker calls it before it makes what it may give up again."""
    gc.freeze()
    gc.enable()


class _OwnerClosed(BaseException):
    """The owner closed the channel during a call."""


def _answer(owner: Channel, methods: Mapping[str, Method], frame: Frame) -> None:
    name = frame.method

    def progress(meta: dict[str, Any]) -> None:
        try:
            owner.send(meta, kind="progress", call=frame.call)
        except OSError:
            raise _OwnerClosed from None

    def tell(meta: Meta) -> None:
        try:
            owner.send(meta, kind="heartbeat", call=frame.call)
        except OSError:
            raise _OwnerClosed from None

    try:
        if name not in methods:
            raise LookupError(f"this worker has no call '{name}'")
        with WAITS.telling(tell), call_span(frame):
            meta, blobs = methods[name](frame.meta, frame.blobs, progress)
    except UserError as error:
        logger.error("'%s': %s", name, error)
        owner.send(error_meta(error), kind="error", call=frame.call)
        return
    except Exception as error:
        logger.exception("'%s' failed", name)
        owner.send(error_meta(error), kind="error", call=frame.call)
        return
    try:
        owner.send(meta, blobs, kind="result", call=frame.call)
    except ValueError as error:
        logger.exception("'%s' failed", name)
        owner.send(error_meta(error), kind="error", call=frame.call)


def dump_stack_on_abort() -> None:
    """Makes SIGABRT, which is sent to a worker that does not answer in time, write the stack of every thread to standard error and end the
    process without a core file. ``serve`` calls it; a worker that runs other code before ``serve`` calls it first."""
    import resource

    faulthandler.enable(sys.stderr)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
