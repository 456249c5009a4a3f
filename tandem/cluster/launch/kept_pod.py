"""A pod that a launcher keeps on its node: its process is started again where it dies, as long as the node is the run's."""

import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from tandem.runtime.process.backoff import Backoff
from tandem.runtime.process.processes import describe_exit
from tandem.types import RunError, UserError

_WORKS_S = 60.0
"""A process that lasted so long has worked: what ends it then is not what ended those before."""


class KeptPod:
    """``start``: begins the pod's process, which ends with the block. ``say``: of messages for the user. ``most_deaths``: without such a time of work in
    between, after which the pod is given up; 0: it never is."""

    def __init__(self, start: "Callable[[], AbstractContextManager[subprocess.Popen[bytes]]]", say: Callable[[str], None], most_deaths: int = 0) -> None:
        self._start, self._say, self._most_deaths = start, say, most_deaths
        # Again in the thread that has it: the handler of a signal may run inside.
        self._leaves, self._lock = threading.Event(), threading.RLock()
        self._pod: subprocess.Popen[bytes] | None = None

    def leave(self) -> None:
        """Lets the pod leave, and starts no other one. May be called at any time, also from a signal handler."""
        with self._lock:
            self._leaves.set()
            if self._pod is not None and self._pod.poll() is None:
                self._pod.terminate()

    def run(self) -> int:
        """Returns when the pod has left, was released or refused, or is given up, with its exit status."""
        backoff, deaths, status = Backoff(), 0, 0
        while not self._leaves.is_set():
            began = time.monotonic()
            try:
                with self._start() as pod:
                    with self._lock:
                        self._pod = pod
                        if self._leaves.is_set():
                            pod.terminate()
                    status = pod.wait()
                said = describe_exit(status)
            except (OSError, RunError) as error:
                # Such as a full disk, which may not stay full.
                status, said = 1, str(error)
            if status in (0, UserError.exit_code) or self._leaves.is_set():
                break
            deaths = 1 if time.monotonic() - began >= _WORKS_S else deaths + 1
            if deaths == self._most_deaths:
                self._say(f"ended ({said}), {deaths} times without a minute of work in between; it is given up, and its node is lost to the run")
                break
            wait_s = backoff.wait_s(int(began // _WORKS_S))
            self._say(f"ended ({said}); it starts again in {wait_s:g} s")
            self._leaves.wait(wait_s)
        return status if status >= 0 else 128 - status
