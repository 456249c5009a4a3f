"""Forks worker processes that find their modules already imported: ``python -m tandem.runtime.process.fork_server --requests FD``.

It imports the modules of its first request once, and then does nothing but fork: it has one thread and no device, without which a fork is not safe, and
refuses to fork where that is not so. ``forks`` is the side of its owner and of the others that share it, each over a socket of its own: the workers of one
that closes its socket, or dies, are killed. The server ends when its owner closes the socket, and all its children with it.
"""

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from tandem.runtime.process.child import die_with_parent, prepare
from tandem.runtime.process.fast_exit import end_forked

MAX_REQUEST_BYTES = 1 << 17
MAX_DESCRIPTORS = 16
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
"""Beginnings of the device files that a process has opened when it has begun to use a GPU, by whatever library."""
REAP_MS = 100
"""Milliseconds between two looks at whether killed workers have ended."""
ROOM_BYTES = 4096
"""Bytes of the command line that a child's own may take."""


class CommandLine:
    """The memory in which the kernel reads this process's command line, as ``ps`` shows it. A fork has that of its parent."""

    def __init__(self) -> None:
        self._start = self._size = 0
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            # Fields 48 and 49 of proc(5); the first two are cut off.
            self._start = int(fields[45])
            self._size = int(fields[46]) - self._start

    def set(self, words: Sequence[str]) -> None:
        """Shows ``words`` as the command line, as far as there is room."""
        if self._size > 1:
            shown = b"".join(word.encode(errors="replace") + b"\0" for word in words)[: self._size - 1]
            ctypes.memmove(self._start, shown.ljust(self._size, b"\0"), self._size)


@dataclass(slots=True)
class Client:
    """Who asks over ``socket``. ``children``: the workers that it has and that have not been waited for, by whether they lead a process group."""

    socket: socket.socket
    children: dict[int, bool] = field(default_factory=dict)


class ForkServer:
    """Answers the requests of ``owner``, and of all that it passes a socket for, one after the other."""

    def __init__(self, owner: socket.socket) -> None:
        self._line, self._clients, self._killed = CommandLine(), {owner.fileno(): Client(owner)}, set[int]()
        self._owner = self._clients[owner.fileno()]
        self._line.set([sys.executable, "-m", "tandem.runtime.process.fork_server"])
        for module in json.loads(owner.recv(MAX_REQUEST_BYTES))["modules"]:
            import_module(module)
        # A collection in a child would write to every object, and so copy the pages that it shares with this process.
        gc.freeze()

    def serve(self) -> None:
        """Serves until the owner closes the socket."""
        while True:
            waiting = select.poll()
            for number in self._clients:
                waiting.register(number, select.POLLIN)
            for number, _ in waiting.poll(REAP_MS if self._killed else None):
                client = self._clients[number]
                try:
                    self._serve_one(client)
                except OSError:  # It has died, or closed the socket: there is no other end of a socket.
                    if client is self._owner:
                        return
                    self._leave(number)
            self._killed -= {child for child in self._killed if os.waitpid(child, os.WNOHANG)[0]}

    def _serve_one(self, client: Client) -> None:
        """Answers the next request. Raises ``OSError`` where there will be none."""
        data, descriptors, _, _ = socket.recv_fds(client.socket, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        try:
            if not data:
                raise ConnectionResetError
            request = json.loads(data)
            if "ended" in request:
                _answer(client, {"status": self._status(client, int(request["ended"]))})
            elif "shares" in request:
                other = socket.socket(fileno=os.dup(descriptors[0]))
                self._clients[other.fileno()] = Client(other)
            elif trouble := why_not_to_fork():
                _answer(client, {"trouble": trouble})
            else:
                self._fork(client, request, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _leave(self, number: int) -> None:
        """Kills the workers of a client that has left, as the kernel does with those of a process that started them itself."""
        client = self._clients.pop(number)
        client.socket.close()
        for child, leads in client.children.items():
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if leads and os.getpgid(child) == child else os.kill)(child, signal.SIGKILL)
        self._killed |= client.children.keys()

    def _fork(self, client: Client, request: dict[str, Any], descriptors: Sequence[int]) -> None:
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            self._become(request, descriptors, parent)
        client.children[child] = bool(request["session"])
        # The client's view of the child's end: the child's id is not used again before this process has waited for it.
        watch = os.pidfd_open(child)
        try:
            _answer(client, {"pid": child}, [watch])
        finally:
            os.close(watch)

    def _become(self, request: dict[str, Any], descriptors: Sequence[int], parent: int) -> None:
        """Runs the worker of ``request`` in this new process, and ends it. The first descriptor is its output."""
        status = 1
        try:
            die_with_parent(parent)
            if request["session"]:
                os.setsid()
            for client in self._clients.values():
                client.socket.close()
            output, *passed = descriptors
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            move_descriptors(passed, request["numbers"])
            os.environ.update(request["environment"])
            module, arguments = request["module"], request["arguments"]
            self._line.set([sys.executable, "-m", "tandem.runtime.process.child", str(parent), "worker", module, *arguments])
            prepare("worker", module, arguments)
            import_module(module).run(arguments)
            status = 0
        except SystemExit as ending:
            status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            end_forked(status)

    def _status(self, client: Client, child: int) -> int | None:
        """Returns the exit status of a child of ``client`` as ``subprocess`` has it, ``None`` while it runs."""
        if child not in client.children:
            return None
        ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            return None
        del client.children[child]
        return os.waitstatus_to_exitcode(status)


def _answer(client: Client, reply: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    socket.send_fds(client.socket, [json.dumps(reply).encode()], descriptors)


def move_descriptors(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives ``descriptors`` the ``numbers`` that the arguments of a worker name, none of which another open file may have."""
    above = max([*descriptors, *numbers], default=0) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        with contextlib.suppress(OSError):
            os.fstat(number)
            raise RuntimeError(f"descriptor {number} of the fork server is taken")
        os.dup2(descriptor, number)
        os.close(descriptor)


def why_not_to_fork() -> str:
    """Returns why a fork of this process would not be safe; empty if it is."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        return f"it has {threads} threads"
    torch = sys.modules.get("torch")
    if torch is not None and (torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()):
        return "it has begun to use a GPU"
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # The one of this loop.
            if (opened := str(entry.readlink())).startswith(DEVICES):
                return f"it has opened the device file {opened}, so it may have a context on a GPU, which a fork would break"
    return ""


def main() -> None:
    number = int(sys.argv[sys.argv.index("--requests") + 1])
    owner = socket.socket(fileno=number)
    owner.set_inheritable(False)
    with contextlib.closing(owner), contextlib.suppress(OSError):
        ForkServer(owner).serve()
    os._exit(0)


if __name__ == "__main__":
    main()
