"""What pool and worker say to each other: JSON behind its length (4 bytes, big-endian) on a socket pair."""

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

from tandem.rl.rewards.judgement import Item, Judgement
from tandem.types import ScoreState

LENGTH = struct.Struct(">I")


def encode_message(message: dict[str, Any]) -> bytes:
    body = json.dumps(message, allow_nan=True).encode()
    return LENGTH.pack(len(body)) + body


def receive_message(channel: socket.socket) -> dict[str, Any] | None:
    """The next message, ``None`` where the other side is gone. Waits."""
    head = _receive(channel, LENGTH.size)
    body = _receive(channel, LENGTH.unpack(head)[0]) if head is not None else None
    if body is None:
        return None
    message: dict[str, Any] = json.loads(body)
    return message


def complete_message(buffer: bytearray) -> dict[str, Any] | None:
    """The message at the front of ``buffer``, taken out of it; ``None`` while it is incomplete."""
    if len(buffer) < LENGTH.size:
        return None
    end = LENGTH.size + LENGTH.unpack_from(buffer)[0]
    if len(buffer) < end:
        return None
    message: dict[str, Any] = json.loads(buffer[LENGTH.size : end])
    del buffer[:end]
    return message


def items_to_json(items: Sequence[Item], completion_ids: bool) -> list[Any]:
    """``completion_ids``: whether the judge reads them; most do not, and they are the bulk of a long sample."""
    return [
        [*item[:3], list(item.completion_ids) if completion_ids else [], item.ground_truth, item.task, dict(item.columns)] for item in items
    ]


def items_from_json(data: list[Any]) -> list[Item]:
    return [Item(*fields) for fields in data]


def judgements_to_json(judgements: Sequence[Judgement]) -> list[Any]:
    return [[j.state.value, j.value, j.reason, j.correct, dict(j.details)] for j in judgements]


def judgements_from_json(data: list[Any]) -> list[Judgement]:
    return [Judgement(ScoreState(state), value, reason, correct, details) for state, value, reason, correct, details in data]


def _receive(channel: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = channel.recv(min(count - len(parts), 1 << 20))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
