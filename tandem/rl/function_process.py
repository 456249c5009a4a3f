"""A process that runs functions of the user, as its owner sees it: started, called with a deadline, and ended with its child processes."""

import argparse
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.runtime.import_path import path_for_children
from tandem.runtime.process.processes import ChildProcess, Threads, describe_exit
from tandem.runtime.process.worker import Worker, dump_stack_on_abort
from tandem.runtime.rpc.calls import Meta, RpcTimeout, WorkerDied
from tandem.runtime.traces.spans import SPANS


@dataclass(frozen=True, slots=True)
class Loaded:
    """The answer to the call ``load``: the digest of each file that defines a function, and the columns of a prompt that they cannot do without."""

    files: dict[str, str]
    columns: list[str] = field(default_factory=list)


def function_options(description: str | None, option: str, name: str) -> tuple[str, int]:
    """Reads the command of such a process, which takes ``option`` and ``--channel``, and prepares it: prints of the functions go to its log. Returns both
    values. ``name``: of its traces."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(option, dest="value", required=True)
    parser.add_argument("--channel", type=int, required=True)
    options = parser.parse_args()
    # Standard input is already empty; standard output is redirected to standard error, which is the worker's log.
    os.dup2(2, 1)
    # Also while functions are loaded, before it serves.
    dump_stack_on_abort()
    SPANS.identify(name)
    return options.value, options.channel


class CallHung(Exception):
    """Raised when there is no answer within the deadline; the process has ended."""


class CallDied(Exception):
    """Raised when the process ended during a call; the message says how."""


class PoolClosed(Exception):
    """Raised when the pool was closed while a call was in progress."""


class FunctionProcess:
    """One process of a pool. Used by one thread at a time, except ``kill``. ``closed`` is set before the pool kills its processes."""

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], log: Path, closed: threading.Event, environment: Mapping[str, str] | None = None
    ) -> None:
        """Starts ``python -m MODULE ARGUMENTS``, called ``name`` in messages, with its output in ``log`` and ``environment`` beside that of this process."""
        self._closed = closed
        self._worker = Worker(
            name,
            module,
            arguments,
            threads=Threads(),
            new_session=True,
            output=log,
            # The hash seed is fixed, so that a function that iterates over a set gives the same result after a restart.
            environment={"PYTHONHASHSEED": "0", "PYTHONPATH": path_for_children(), **(environment or {})},
        )

    @property
    def process(self) -> ChildProcess:
        return self._worker.process

    def call(self, name: str, meta: Meta, deadline_s: float) -> dict[str, Any]:
        """Returns the answer of the call ``name``. Raises ``CallHung``, ``CallDied`` and ``PoolClosed``, and what the call raised."""
        if self._closed.is_set():
            raise PoolClosed
        try:
            return self._worker.call(name, meta, deadline_s=deadline_s).meta
        except (RpcTimeout, WorkerDied) as error:
            status = self._worker.stop(grace_s=0.0)
            if self._closed.is_set():
                raise PoolClosed from None
            raise (CallHung() if isinstance(error, RpcTimeout) else CallDied(describe_exit(status))) from None

    def ended(self) -> bool:
        """Whether the process has ended."""
        return not self._worker.alive

    def kill(self) -> None:
        """Terminates the process and its whole group. May be called from another thread during a call."""
        self._worker.stop(grace_s=0.0)
