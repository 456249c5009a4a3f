"""Random numbers that are a function of a key alone, so that any position of a stream can be asked for first."""

import hashlib
from random import Random

Key = str | int


def counter_seed(*key: Key) -> int:
    """A 64-bit number that ``key`` determines, the same in every process and version."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def counter_random(*key: Key) -> Random:
    """A generator that ``key`` determines."""
    return Random(counter_seed(*key))
