"""A pool of processes that run functions of the user, so that one that hangs or dies costs only its own call."""

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tandem.rl.function_process import CallHung, FunctionProcess, Loaded
from tandem.runtime.rpc.calls import Meta, message_from
from tandem.runtime.traces.context import in_context
from tandem.types import UserError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Program:
    """What the processes of a pool run: ``python -m MODULE ARGUMENTS``, which has a call ``load``. ``what``: what it loads, for messages; ``name``: of a
    process and, with a number, of its log; ``start_deadline_s``: for ``load``, the key ``deadline_key`` of the recipe."""

    what: str
    name: str
    module: str
    arguments: Sequence[str]
    start_deadline_s: float
    deadline_key: str


class FunctionPool:
    """``size`` processes of ``program``. They die with this process however it dies, and are replaced when they die. Their output goes to
    ``log_dir/NAME-N.log``. ``environments``: further variables of each process, by number.

    The constructor loads the functions and raises ``UserError`` if they cannot be loaded.
    """

    def __init__(self, program: Program, size: int, log_dir: Path | None = None, environments: Sequence[Mapping[str, str]] = ()) -> None:
        self._program, self._closed = program, threading.Event()
        self._environments = list(environments) or [{}] * size
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        self.logs = [log_dir / f"{program.name}-{number}.log" if log_dir is not None else Path(os.devnull) for number in range(size)]
        self._lock = threading.Lock()
        self._files: dict[str, str] = {}
        self.columns: list[str] = []
        """Those of a prompt that the functions cannot do without."""
        self._processes: dict[int, FunctionProcess] = {}
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(size, program.name)
        try:
            for number in range(size):
                self._start(number)
            for number in range(size):
                self._wait_ready(self._processes[number])
                self._idle.put(number)
        except BaseException:
            self.close()
            raise

    def run(self, work: Callable[[int], T]) -> "Future[T]":
        """Starts ``work`` in a thread with the number of a process that nothing else uses meanwhile, when one is free."""

        def with_process() -> T:
            number = self._idle.get()
            try:
                return work(number)
            finally:
                self._idle.put(number)

        return self._threads.submit(in_context(with_process))

    def call(self, number: int, name: str, meta: Meta, deadline_s: float) -> dict[str, Any]:
        """Returns the answer of process ``number``, which is replaced if it has ended, to the call ``name``. Raises ``CallHung``, ``CallDied`` and
        ``PoolClosed``, and ``UserError`` where it cannot be replaced."""
        if self._processes[number].ended():
            self._wait_ready(self._start(number))
        return self._processes[number].call(name, meta, deadline_s)

    def close(self) -> None:
        """Terminates every process with its child processes."""
        self._closed.set()
        with self._lock:
            for process in self._processes.values():
                process.kill()
        self._threads.shutdown(cancel_futures=True)

    def _start(self, number: int) -> FunctionProcess:
        program = self._program
        name = f"the {program.name.replace('-', ' ')}"
        process = FunctionProcess(name, program.module, program.arguments, self.logs[number], self._closed, self._environments[number])
        with self._lock:
            self._processes[number] = process
        return process

    def _wait_ready(self, process: FunctionProcess) -> None:
        """Waits until the functions are loaded. Raises ``UserError``, and ``CallDied`` and ``PoolClosed``."""
        program = self._program
        try:
            loaded = message_from(Loaded, process.call("load", {}, program.start_deadline_s))
        except CallHung:
            raise UserError(
                f"{program.what} not loaded within {program.start_deadline_s:g} s; do less work at import time or raise {program.deadline_key}"
            ) from None
        files, self.columns = loaded.files, loaded.columns
        self._files = self._files or files
        if changed := [file for file, digest in files.items() if self._files.get(file) != digest]:
            process.kill()
            raise UserError(f"'{changed[0]}' was changed while the run used it: restore it, or resume the run with it")
