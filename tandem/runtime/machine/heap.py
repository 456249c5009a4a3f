"""Settings of glibc's allocator for freed memory."""

import contextlib
import ctypes
import logging
from collections.abc import Callable, Iterator, Mapping

logger = logging.getLogger(__name__)

TUNABLES = {"glibc.malloc.tcache_count": "0", "glibc.malloc.arena_max": "1"}
"""glibc's settings for a process that keeps freed memory, read at its start. ``memalign`` (torch aligns every tensor to 64 bytes) cuts a remainder off
the end of a chunk; in a thread's cache that remainder never merges with the chunk again, so a freed tensor's chunk is a few bytes too small for
the next tensor of its size (glibc bug 14581, fixed in 2.38) and the heap grows by two to three times. One arena: threads reuse each other's
memory. Measured on two ranks of 106M parameters, ZeRO 3: a peak of 2,618 MiB instead of 3,866 MiB, and a third less time in page faults."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
KEPT_BYTES = 64 << 20
"""Freed memory that a process keeps at most from one training step to the next, where it is not given back."""
_AFTERWARDS = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: KEPT_BYTES}
"""The largest thresholds that glibc adapts to by itself (``mallopt(3)``), as it does where large tensors are freed; it no longer adapts those that were set."""
_LARGE_BYTES = 1 << 20


@contextlib.contextmanager
def freed_memory_kept(gives_back: bool = True) -> Iterator[None]:
    """Makes this process reuse freed memory instead of returning it to the system, inside the context: a training step frees and allocates the
    same activations, and page faults on new pages were measured as 3 to 8 % of its time; so does an engine's step, above all the logits. At the end
    glibc's thresholds are set again, and free memory is returned: at once, or without ``gives_back`` what is above 64 MiB when the next large block
    is freed. Does nothing without glibc."""
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        for name, value in _AFTERWARDS.items():
            mallopt(name, value)
        if gives_back:
            give_back()


def small_steps_keep_memory() -> None:
    """Makes this process keep up to 64 MiB of freed memory from here on, the most that glibc keeps by itself where tensors are large: by those of a
    small model it keeps less than a training step frees, and page faults on new pages were measured as 5 % of its time. Does nothing without glibc."""
    mallopt = _mallopt()
    if mallopt is not None:
        for name, value in _AFTERWARDS.items():
            mallopt(name, value)


def give_back_large_memory() -> None:
    """Makes glibc return freed memory of 1 MiB and more to the system, from here on, instead of keeping and fragmenting it: for processes where
    size matters more than speed. Does nothing without glibc."""
    mallopt = _mallopt()
    if mallopt is not None:
        # glibc does not adapt a threshold that was set.
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)


def use_one_arena() -> None:
    """Makes glibc serve all threads that start from here on from one arena: what one thread frees another reuses, and ``give_back`` returns it. In
    a process with an arena for each thread, 140 MiB of freed memory stayed after a few texts of 1 MiB were tokenized."""
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)


def kept_heap_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to add to ``environment`` for a child process that runs under ``freed_memory_kept``. Keeps what ``GLIBC_TUNABLES`` already
    sets there."""
    given = [item for item in environment.get("GLIBC_TUNABLES", "").split(":") if item]
    named = {item.partition("=")[0] for item in given}
    return {"GLIBC_TUNABLES": ":".join([*given, *(f"{name}={value}" for name, value in TUNABLES.items() if name not in named)])}


def _mallopt() -> Callable[[int, int], int] | None:
    try:
        mallopt: Callable[[int, int], int] = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        logger.debug("no mallopt in this C library; freed memory is returned to the system")
        return None
    return mallopt


def give_back() -> None:
    """Returns free memory to the system, if the C library can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
