"""Exchanges small values between ranks, and agrees on errors."""

import ctypes
import json
from typing import Any

import torch

from tandem.runtime.collectives.communicator import Communicator
from tandem.types import RunError

INLINE_BYTES = 4096
"""What the first exchange carries of each value. A second one follows only where a value is longer."""
SIZE_BYTES = 8


def gather_values(ranks: Communicator, value: Any, name: str) -> list[Any]:
    """Returns every rank's ``value`` (JSON), by rank, on every rank."""
    data = json.dumps(value).encode()
    if ranks.size == 1:
        return [json.loads(data)]
    first = _gather(ranks, len(data).to_bytes(SIZE_BYTES, "little") + data[:INLINE_BYTES], SIZE_BYTES + INLINE_BYTES, name)
    sizes = [int.from_bytes(part[:SIZE_BYTES], "little") for part in first]
    rest = max(sizes) - INLINE_BYTES
    second = _gather(ranks, data[INLINE_BYTES:], rest, f"{name}: the rest") if rest > 0 else [b""] * ranks.size
    return [json.loads((part[SIZE_BYTES:] + more)[:size]) for part, more, size in zip(first, second, sizes, strict=True)]


def _gather(ranks: Communicator, data: bytes, length: int, name: str) -> list[bytes]:
    """Returns every rank's ``data``, padded to ``length`` bytes."""
    padded = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
    return [ctypes.string_at(row.data_ptr(), length) for row in ranks.all_gather(padded, name)]


def check_same_kernels(ranks: Communicator, name: str) -> None:
    """Raises the same ``RunError`` on every rank if ``name``, of the kernels that a rank computes with, is not the same on all."""
    names = gather_values(ranks, name, "the kernels")
    if len(set(names)) > 1:
        used = ", ".join(f"rank {rank} {kernels}" for rank, kernels in enumerate(names))
        raise RunError(f"ranks compute with different kernels ({used}), so their bits differ; set machine.kernels, or repair the compiler of the others")


def vote(ranks: Communicator, what: str, trouble: str | None, value: Any = None) -> list[Any]:
    """Returns every rank's ``value``. Raises the same ``RunError``, which names the rank, on every rank if one has ``trouble``."""
    votes = gather_values(ranks, [trouble, value], what)
    for rank, (problem, _) in enumerate(votes):
        if problem is not None:
            raise RunError(f"{what}: rank {rank}: {problem}" if ranks.size > 1 else f"{what}: {problem}")
    return [value for _, value in votes]
