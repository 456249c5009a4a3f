"""What the C library does with memory that was freed."""

import contextlib
import ctypes
import logging
from collections.abc import Callable, Iterator, Mapping

logger = logging.getLogger(__name__)

TUNABLES = {"glibc.malloc.tcache_count": "0", "glibc.malloc.arena_max": "1"}
"""What a process whose freed memory is kept asks of glibc at its start. ``memalign`` (torch aligns every tensor to 64 bytes) cuts a remainder off
the end of a chunk; in a thread's cache that remainder never merges with the chunk again, so a freed tensor's chunk is a few bytes too small for
the next tensor of its size (glibc bug 14581, mended in 2.38) and the heap grows by two to three times. One arena: threads reuse each other's
memory. Measured on two ranks of 106M parameters, ZeRO 3: 2,618 MiB at the peak instead of 3,866, and a third less time in page faults."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_DEFAULTS = {_TRIM_THRESHOLD: 128 * 1024, _MMAP_MAX: 65536}
_LARGE_BYTES = 1 << 20


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Inside, this process uses freed memory again instead of giving it back and asking anew: a training step frees and allocates
    the same activations, and touching fresh pages was measured as 3 to 8 % of it. At the end glibc's defaults hold again and free memory
    goes back. For a process whose work repeats; without glibc nothing changes."""
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        for name, value in _DEFAULTS.items():
            mallopt(name, value)
        _give_back()


@contextlib.contextmanager
def large_memory_given_back() -> Iterator[None]:
    """Inside, and from then on, memory of 1 MiB and more goes back when it is freed, where glibc would come to keep it and cut it up: for a
    process that is to be small more than fast."""
    mallopt = _mallopt()
    if mallopt is not None:
        # A threshold that was set is not moved by what is freed.
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
    yield


def kept_heap_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to add to ``environment`` for a child process that runs under ``freed_memory_kept``. What ``GLIBC_TUNABLES`` already
    sets there stays."""
    given = [item for item in environment.get("GLIBC_TUNABLES", "").split(":") if item]
    named = {item.partition("=")[0] for item in given}
    return {"GLIBC_TUNABLES": ":".join([*given, *(f"{name}={value}" for name, value in TUNABLES.items() if name not in named)])}


def _mallopt() -> Callable[[int, int], int] | None:
    try:
        found: Callable[[int, int], int] = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        logger.debug("no mallopt on this C library; freed memory goes back to the machine")
        return None
    return found


def _give_back() -> None:
    """What is free goes back to the machine, where the C library can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
