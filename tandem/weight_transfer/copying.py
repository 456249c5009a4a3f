"""Copies and digests memory in one pass, a chunk at a time, so that the digest reads from the cache what the copy wrote. No torch.

``ctypes`` and ``xxhash`` both release the GIL, so threads of one process run in parallel.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import xxhash

# Measured from 64 KiB to 4 MiB: from 256 KiB on two threads are twice as fast as one; below, they contend for the GIL.
CHUNK_BYTES = 256 * 1024
_SAMPLE_BYTES = 4096

T = TypeVar("T")
R = TypeVar("R")


def address_of(memory: memoryview) -> int:
    """Returns the address of the first byte of a writable buffer, valid as long as the buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def copy_and_digest(destination: int, source: int, size_bytes: int, *, of_source: bool) -> str:
    """Copies ``size_bytes`` between two addresses that do not overlap; returns the xxh3-128, in hexadecimal, of the source or of the copy.
    If another process may write the source concurrently, only the copy's digest is meaningful."""
    digest = xxhash.xxh3_128()
    for at in range(0, size_bytes, CHUNK_BYTES):
        count = min(CHUNK_BYTES, size_bytes - at)
        if of_source:
            digest.update((ctypes.c_char * count).from_address(source + at))
        ctypes.memmove(destination + at, source + at, count)
        if not of_source:
            digest.update((ctypes.c_char * count).from_address(destination + at))
    return digest.hexdigest()


def digest_of(source: int, size_bytes: int) -> str:
    """Returns the xxh3-128, in hexadecimal, of ``size_bytes`` at an address."""
    # In one call: nothing of it has to stay in the cache, and threads need not contend for the GIL between chunks.
    return str(xxhash.xxh3_128_hexdigest((ctypes.c_char * size_bytes).from_address(source)))


def looks_equal(one: int, other: int, size_bytes: int) -> bool:
    """Returns whether samples of the ``size_bytes`` at two addresses are equal: the first, middle and last 4 KiB. What differs in one of them differs; what is
    equal in all is compared by digest, because training seldom changes only a few elements of a tensor."""
    for at in {0, max(0, size_bytes // 2 - _SAMPLE_BYTES), max(0, size_bytes - _SAMPLE_BYTES)}:
        count = min(_SAMPLE_BYTES, size_bytes - at)
        if ctypes.string_at(one + at, count) != ctypes.string_at(other + at, count):
            return False
    return True


class Threads:
    """Maps a function over many items on ``count`` threads. Each takes the heaviest item that is left, so that one which the machine holds up does not hold up
    the others."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="copy") if count > 1 else None

    def map(self, function: Callable[[T], R], items: Sequence[T], weights: Sequence[int]) -> list[R]:
        """Returns ``function`` of every item, in order. ``weights``: bytes of each item. Raises the exception of any call."""
        if self._pool is None:
            return [function(item) for item in items]
        results: dict[int, R] = {}
        # Appending and popping are atomic.
        left = deque(sorted(range(len(items)), key=lambda i: -weights[i]))

        def run() -> None:
            while True:
                try:
                    i = left.popleft()
                except IndexError:
                    return
                results[i] = function(items[i])

        for future in [self._pool.submit(run) for _ in range(self._count)]:
            future.result()
        return [results[i] for i in range(len(items))]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
