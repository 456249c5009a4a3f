"""Ends a process without the teardown of its modules, which takes half a second where torch is imported."""

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn


@contextlib.contextmanager
def fast_exit() -> Iterator[None]:
    """Runs the program of a process, whose threads and own exit handlers end as always, and then ends the process at once with the program's status.

    Python would also visit each object to free it, which the kernel does by pages. After an exception other than ``SystemExit``, or if the
    output cannot be written, the process ends as Python ends it.
    """
    statuses: list[int] = []
    # Handlers run in the reverse order, so all that the program registers have run before this one.
    atexit.register(_end, statuses)
    try:
        yield
    except SystemExit as ending:
        if ending.code is None or isinstance(ending.code, int):
            statuses.append(int(ending.code or 0))
        raise
    statuses.append(0)


def end_forked(status: int) -> NoReturn:
    """Ends a forked process at once, whose exit handlers are copies of those of its parent."""
    _flushed()
    os._exit(status)


def _end(statuses: list[int]) -> None:
    if statuses and _flushed():
        os._exit(statuses[0] & 0xFF)


def _flushed() -> bool:
    """Writes what the process has still to print. Returns whether all of it could be written."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # The caller has closed it.
                stream.flush()
    except (OSError, ValueError):
        return False
    return True
