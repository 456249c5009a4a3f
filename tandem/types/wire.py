"""Messages between processes and entries of the journal: exact, bounds-checked, no pickle.

A *frame* is ``magic, header bytes (u32), payload bytes (u64), header, payload``, all little-endian. The header is JSON:
``{"kind": str, "meta": {...}, "blobs": [[name, bytes], ...]}``; the payload is the blobs, one after the other. What does not
decode raises ``ValueError`` with what is wrong; nothing beyond the given bytes is ever read or allocated.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PREFIX = struct.Struct("<4sIQ")
MAGIC = b"TDM1"
MAX_HEADER_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. ``kind`` says what it is to a protocol (``""``: plain data), ``meta`` is JSON, ``blobs`` are bytes
    by name."""

    meta: dict[str, Any]
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    kind: str = ""


def encode(meta: Mapping[str, Any], blobs: Mapping[str, bytes] | None = None, kind: str = "") -> bytes:
    """A frame as bytes. Raises ``ValueError`` where ``meta`` is not JSON."""
    blobs = blobs or {}
    try:
        header = json.dumps(
            {"kind": kind, "meta": dict(meta), "blobs": [[name, len(blob)] for name, blob in blobs.items()]},
            separators=(",", ":"),
        ).encode("ascii")
    except (TypeError, ValueError) as error:
        raise ValueError(f"a frame's meta is not JSON: {error}") from None
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"a frame's header has {len(header)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    payload_bytes = sum(len(blob) for blob in blobs.values())
    return b"".join((PREFIX.pack(MAGIC, len(header), payload_bytes), header, *blobs.values()))


def frame_sizes(prefix: bytes, limit_bytes: int) -> tuple[int, int]:
    """Header and payload bytes that follow ``prefix`` (``PREFIX.size`` bytes). Raises ``ValueError`` past
    ``limit_bytes``."""
    magic, header_bytes, payload_bytes = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise ValueError(f"not a frame: it starts with {magic!r}")
    if header_bytes > MAX_HEADER_BYTES or header_bytes + payload_bytes > limit_bytes:
        raise ValueError(f"a frame of {header_bytes} + {payload_bytes} bytes; at most {limit_bytes} are allowed")
    return header_bytes, payload_bytes


def decode(data: bytes | memoryview) -> Frame:
    """The frame that ``data`` is, whole and nothing more. Raises ``ValueError``."""
    if len(data) < PREFIX.size:
        raise ValueError(f"a frame of {len(data)} bytes is shorter than its prefix")
    header_bytes, payload_bytes = frame_sizes(bytes(data[: PREFIX.size]), len(data))
    body = PREFIX.size + header_bytes
    if body + payload_bytes != len(data):
        raise ValueError(f"a frame of {len(data)} bytes says it has {body + payload_bytes}")
    return decode_body(data[PREFIX.size : body], data[body:])


def decode_body(header: bytes | memoryview, payload: bytes | memoryview) -> Frame:
    """The frame of a header and a payload that were read after a prefix. Raises ``ValueError``."""
    try:
        parsed = json.loads(bytes(header))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a frame's header is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError("a frame's header is not an object")
    kind, meta, sizes = parsed.get("kind"), parsed.get("meta"), parsed.get("blobs")
    if not isinstance(kind, str) or not isinstance(meta, dict) or not isinstance(sizes, list):
        raise ValueError("a frame's header lacks kind, meta or blobs")
    blobs: dict[str, bytes] = {}
    at = 0
    for item in sizes:
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and type(item[1]) is int):
            raise ValueError(f"a frame's blob is described as {item!r}")
        name, size = item
        if size < 0 or size > len(payload) - at or name in blobs:
            raise ValueError(f"a frame's blob '{name}' of {size} bytes does not fit its payload")
        blobs[name] = bytes(payload[at : at + size])
        at += size
    if at != len(payload):
        raise ValueError(f"a frame's payload has {len(payload) - at} bytes too many")
    return Frame(meta, blobs, kind)
