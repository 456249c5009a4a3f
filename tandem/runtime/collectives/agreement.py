"""Exchanges small values between ranks, and agrees on errors."""

import ctypes
import json
from typing import Any

import torch

from tandem.runtime.collectives.communicator import Communicator
from tandem.types import RunError


def gather_values(ranks: Communicator, value: Any, name: str) -> list[Any]:
    """Returns every rank's ``value`` (JSON), by rank, on every rank."""
    if ranks.size == 1:
        return [json.loads(json.dumps(value))]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = ranks.all_gather(torch.tensor([data.numel()]), f"{name}: sizes").view(-1).tolist()
    padded = torch.nn.functional.pad(data, (0, max(sizes) - data.numel()))
    gathered = ranks.all_gather(padded, name)
    return [json.loads(ctypes.string_at(row.data_ptr(), size)) for row, size in zip(gathered, sizes, strict=True)]


def vote(ranks: Communicator, what: str, trouble: str | None, value: Any = None) -> list[Any]:
    """Returns every rank's ``value``. Raises the same ``RunError``, which names the rank, on every rank if one has ``trouble``."""
    votes = gather_values(ranks, [trouble, value], what)
    for rank, (problem, _) in enumerate(votes):
        if problem is not None:
            raise RunError(f"{what}: rank {rank}: {problem}" if ranks.size > 1 else f"{what}: {problem}")
    return [value for _, value in votes]
