"""What every process that serves clients over HTTP needs: uvicorn without its signal handlers, room for connections, and lines on standard error."""

import asyncio
import contextlib
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

import uvicorn

from tandem.serving.log_lines import FILED

BACKLOG = 2048
"""Connections that the system keeps until they are accepted."""
_OTHER_FILES = 64
"""Open files that are not connections of clients."""


class HttpServer(uvicorn.Server):
    """Leaves signals to the process that runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def raise_file_limit() -> None:
    """A connection is a file: takes all that this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 16, hard))


def max_connections() -> int:
    """Returns how many connections of clients this process can have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (1 << 20 if soft == resource.RLIM_INFINITY else max(soft, 2 * _OTHER_FILES)) - _OTHER_FILES


def stop_events() -> tuple[asyncio.Event, asyncio.Event]:
    """Returns what SIGTERM and SIGINT set in the running loop: the first signal the first event, a second one the second."""
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop, stop_now


def host_of(address: tuple[Any, ...]) -> str:
    """Returns the host of a listener's ``address`` as it is written in a URL."""
    return f"[{address[0]}]" if ":" in str(address[0]) else str(address[0])


def say(text: str) -> None:
    """Writes one line for the operator to standard error, and to the log file, if there is one."""
    print(f"tandem: {text}", file=sys.stderr, flush=True)
    FILED.info(text)


def speaker(name: str) -> Callable[[str], None]:
    """Returns ``say`` for one of several processes of a program, which begins every line with its ``name``."""
    return lambda text: say(f"{name}: {text}")
