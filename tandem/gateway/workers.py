"""Several processes of one gateway behind one address: a supervisor starts them, passes signals on, and starts again what dies.

Each worker has a listening socket of its own (``SO_REUSEPORT``), so that the kernel divides connections evenly. The supervisor keeps all of these sockets open:
connections that come while a worker is started again wait for it in its socket, and are not refused. Linux.
"""

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.config.gateway import BackendConfig, GatewayConfig
from tandem.gateway.siblings import Place
from tandem.runtime.process.backoff import Backoff, describe_wait
from tandem.runtime.process.child import die_with_parent
from tandem.runtime.process.fast_exit import end_forked
from tandem.runtime.process.processes import describe_exit
from tandem.runtime.process.temporary import temporary_folder
from tandem.runtime.rpc.listener import listen
from tandem.serving.http_process import BACKLOG, say, speaker
from tandem.types import UserError

_STOPS = (signal.SIGTERM, signal.SIGINT)
_SETTINGS_READ = signal.SIGUSR1
"""Sent to the supervisor by a worker that has followed a change of the file."""
_SIGNALS = {*_STOPS, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM, _SETTINGS_READ}
_SETTLED_S = 10.0
"""A worker that has lived so long has not failed at its start."""
_BAD_SETTINGS = 2
"""Exit status of a worker whose settings cannot be used."""

Serve = Callable[[GatewayConfig, socket.socket, Place], int]
"""Serves as one worker until SIGTERM; returns the exit status."""


def run_workers(config: GatewayConfig, serve: Serve, read: Callable[[], GatewayConfig] | None) -> int:
    """Serves with ``config.workers`` processes until SIGTERM or SIGINT; returns the exit status. ``read``: reads the settings again. Raises ``UserError``
    if the port cannot be taken."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(temporary_folder(prefix="tandem-gateway"))
        listeners = [stack.enter_context(each) for each in _listen(config)]
        stack.enter_context(_blocked())
        return _Supervisor(config, listeners, folder, serve, read).run()


def share_of_worker(config: GatewayConfig, number: int) -> GatewayConfig:
    """Returns the settings of worker ``number``: of ``max_requests`` of each backend and of the places in the queue it has its part, so that the gateway has
    as many in all as its file says."""

    def part(whole: int) -> int:
        return whole // config.workers + (number < whole % config.workers)

    def share(backend: BackendConfig) -> BackendConfig:
        return replace(backend, max_requests=part(backend.max_requests))

    queue = replace(config.queue, max_waiting=max(1, part(config.queue.max_waiting)), max_waiting_per_tenant=max(1, part(config.queue.max_waiting_per_tenant)))
    return replace(config, backends=tuple(map(share, config.backends)), queue=queue)


def settings_were_read() -> None:
    """Tells the supervisor that the file was read again, so that workers which it starts from now on begin with it."""
    os.kill(os.getppid(), _SETTINGS_READ)


@dataclass
class _Worker:
    pid: int
    started: float


class _Supervisor:
    def __init__(
        self, config: GatewayConfig, listeners: list[socket.socket], folder: Path, serve: Serve, read: Callable[[], GatewayConfig] | None
    ) -> None:
        self._config, self._listeners, self._folder, self._serve, self._read = config, listeners, folder, serve, read
        self._workers: dict[int, _Worker] = {}
        self._due: dict[int, float] = {}
        """When those that died are started again."""
        self._backoffs = [Backoff() for _ in listeners]
        self._lives = [0 for _ in listeners]
        """How often each has lived long: its progress."""
        self._statuses: list[int] = []
        self._is_stopping = False

    def run(self) -> int:
        for number in range(len(self._listeners)):
            self._start(number)
        while self._workers or not self._is_stopping:
            self._act(signal.sigwait(_SIGNALS))
        return max(self._statuses, default=0)

    def _act(self, number: int) -> None:
        if number in _STOPS:
            self._is_stopping = True
            self._due.clear()
            self._send(signal.SIGTERM)
        elif number == signal.SIGHUP:
            self._note_settings()
            self._send(signal.SIGHUP)
        elif number == _SETTINGS_READ:
            self._note_settings()
        elif number == signal.SIGALRM:
            for each in [each for each, due in self._due.items() if due <= time.monotonic()]:
                del self._due[each]
                self._start(each)
            self._set_alarm()
        else:
            self._collect()

    def _collect(self) -> None:
        """Deals with every worker that has ended."""
        for number, worker in list(self._workers.items()):
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if not pid:
                continue
            del self._workers[number]
            code = os.waitstatus_to_exitcode(status)
            if self._is_stopping or (code == _BAD_SETTINGS and not self._lives[number]):
                self._statuses.append(code if code >= 0 else 1)
                if not self._is_stopping:
                    self._act(signal.SIGTERM)
                continue
            self._lives[number] += time.monotonic() - worker.started > _SETTLED_S
            wait_s = self._backoffs[number].wait_s(self._lives[number])
            say(f"worker {number}: {describe_exit(code)}; it is started again {describe_wait(wait_s)}")
            self._due[number] = time.monotonic() + wait_s
            self._set_alarm()

    def _set_alarm(self) -> None:
        if self._due:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, min(self._due.values()) - time.monotonic()))

    def _send(self, number: int) -> None:
        for worker in self._workers.values():
            # It is this process's child until it is waited for, so the number belongs to no other process.
            os.kill(worker.pid, number)

    def _note_settings(self) -> None:
        """Reads the settings again for workers that are started from now on. What is wrong with them the workers say, who stay with those before."""
        if self._read is None:
            return
        with contextlib.suppress(UserError):
            config = self._read()
            if (config.workers, config.host, config.port) == (self._config.workers, self._config.host, self._config.port):
                self._config = config

    def _start(self, number: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        parent, is_first = os.getpid(), not self._lives[number] and number == 0
        pid = os.fork()
        if pid:
            self._workers[number] = _Worker(pid, time.monotonic())
            return
        status = 1
        try:
            status = self._work(number, parent, announces=is_first)
        except UserError as error:
            speaker(f"worker {number}")(str(error))
            status = _BAD_SETTINGS
        except BaseException:
            traceback.print_exc()
        finally:
            end_forked(status)

    def _work(self, number: int, parent: int, *, announces: bool) -> int:
        # Ctrl-C of the terminal reaches the supervisor alone, which passes it on once.
        os.setpgid(0, 0)
        die_with_parent(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # SIGHUP stays pending until its handler is installed.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS - {signal.SIGHUP})
        for other, listener in enumerate(self._listeners):
            if other != number:
                listener.close()
        return self._serve(share_of_worker(self._config, number), self._listeners[number], Place(self._folder, number, len(self._listeners), announces))


def _listen(config: GatewayConfig) -> list[socket.socket]:
    """Returns a listening socket for each worker, all at one address. Raises ``UserError`` if it is taken."""
    # Without SO_REUSEPORT, to find out whether anybody else has it: with it two gateways would share the port in silence.
    with listen(config.host, config.port) as first:
        port = first.getsockname()[1]
    listeners: list[socket.socket] = []
    try:
        for _ in range(config.workers):
            listeners.append(listen(config.host, port, backlog=BACKLOG, is_shared=True))
    except UserError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Keeps the signals of the supervisor until it waits for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    handler = signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
