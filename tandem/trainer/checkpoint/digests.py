"""Digests of a file's chunks, so that a part of it can be verified without the rest."""

import hashlib
from collections.abc import Callable
from typing import Any, Literal

Algorithm = Literal["xxh3_128", "blake2b_128"]

CHUNK_BYTES = 4 << 20


def best_algorithm() -> Algorithm:
    """xxh3 where the package is there: ten times the speed of BLAKE2b, against which damage is as unlikely to pass."""
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return "blake2b_128"
    return "xxh3_128"


def chunk_digest(algorithm: str) -> Callable[[Any], str]:
    """The function from bytes to hexadecimal digits. Raises ``ValueError`` for an algorithm that is not known here."""
    if algorithm == "xxh3_128":
        import xxhash

        return lambda data: str(xxhash.xxh3_128_hexdigest(data))
    if algorithm == "blake2b_128":
        return lambda data: hashlib.blake2b(data, digest_size=16).hexdigest()
    raise ValueError(f"the digest '{algorithm}' is not known")


def bytes_digest(data: bytes) -> str:
    """BLAKE2b-128 of a small file, in hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def chunks_over(start: int, stop: int, chunk_bytes: int) -> range:
    """The numbers of the chunks that the bytes ``start .. stop - 1`` lie in."""
    return range(start // chunk_bytes, -(-stop // chunk_bytes)) if start < stop else range(0)
