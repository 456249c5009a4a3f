"""Random numbers as a function of a key alone, so that any position of a stream can be generated directly."""

import hashlib
from random import Random

Key = str | int


def counter_seed(*key: Key) -> int:
    """Returns a 64-bit number determined by ``key``, the same in every process and version."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def counter_random(*key: Key) -> Random:
    """Returns a generator determined by ``key``."""
    return Random(counter_seed(*key))
