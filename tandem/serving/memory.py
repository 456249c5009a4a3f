"""Returns freed memory to the system after large requests."""

import asyncio
import gc

from tandem.runtime.machine.heap import give_back

_DELAY_S = 1.0
_LARGE_BYTES = 2**18


class MemoryReturn:
    """Returns freed memory at most once a second. glibc keeps what many allocations of a large request have freed, in an arena of each thread."""

    def __init__(self) -> None:
        self._scheduled: asyncio.TimerHandle | None = None

    def after(self, body_bytes: int) -> None:
        """A request whose body had ``body_bytes`` has ended."""
        if body_bytes >= _LARGE_BYTES and self._scheduled is None:
            self._scheduled = asyncio.get_running_loop().call_later(_DELAY_S, self._run)

    def _run(self) -> None:
        self._scheduled = None
        asyncio.get_running_loop().run_in_executor(None, _collect)


def freeze_start() -> None:
    """Leaves what was allocated at the start out of all later collections, which would take tens of milliseconds with it."""
    gc.collect()
    gc.freeze()


def _collect() -> None:
    # Connections and their requests refer to each other.
    gc.collect()
    give_back()
