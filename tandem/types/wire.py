"""The frame: the one format of messages between processes and of batches in the journal. Exact, bounds-checked, no pickle.

A frame is ``magic (4 bytes), header bytes (u32), payload bytes (u64), header, payload``, all little-endian. The header is JSON with the
keys ``kind``, ``method``, ``call``, ``meta``, ``trace``, ``spans`` and ``blobs``, a list of ``[name, bytes]``; an empty ``method``, ``call``, ``trace`` and
``spans`` are left out, and spaces fill the header to a multiple of 16 bytes. The payload is the blobs, one after the other. Bytes that are not a frame raise
``ValueError``; nothing beyond the given bytes is read.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PREFIX = struct.Struct("<4sIQ")
MAGIC = b"TDM1"
ALIGNMENT_BYTES = 16
MAX_HEADER_BYTES = 64 * 2**20
MAX_FRAME_BYTES = 2**31

# Made once: ``json.dumps`` with other separators than its own makes an encoder for every call.
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_from_json = json.JSONDecoder().decode

Buffer = bytes | bytearray | memoryview
"""Bytes that are not copied. A memoryview has one dimension of unsigned bytes."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message.

    Args:
        meta: JSON values by name.
        blobs: bytes by name. Of a decoded frame: views of the bytes that were decoded.
        kind: the role of the frame in its protocol (``call``, ``result``, …), or what a record holds (``samples``, …).
        method: the name of the call.
        call: the number of the call, for callers with several calls in flight; 0 where there is one.
        trace: the span that a call is made for, as W3C's ``traceparent``; empty where none is recorded.
        spans: those that the other side has recorded, as JSON (``tandem.runtime.traces.spans``).
    """

    meta: dict[str, Any]
    blobs: Mapping[str, Buffer] = field(default_factory=dict)
    kind: str = ""
    method: str = ""
    call: int = 0
    trace: str = ""
    spans: Sequence[Any] = ()


def encode_parts(
    meta: Mapping[str, Any], blobs: Mapping[str, Buffer] | None = None, kind: str = "", method: str = "", call: int = 0,
    trace: str = "", spans: Sequence[Any] = (),
) -> list[Buffer]:  # fmt: skip
    """Returns a frame as buffers to be sent one after the other: prefix and header, then each blob, not copied. Raises ``ValueError``
    where ``meta`` is not JSON."""
    blobs = blobs or {}
    sizes = [(name, len(blob)) for name, blob in blobs.items()]
    head: dict[str, Any] = {"kind": kind, "meta": meta if type(meta) is dict else dict(meta), "blobs": sizes}
    if method:
        head["method"] = method
    if call:
        head["call"] = call
    if trace:
        head["trace"] = trace
    if spans:
        head["spans"] = spans
    try:
        header = _to_json(head).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a frame's meta is not JSON: {error}") from None
    header += b" " * (-len(header) % ALIGNMENT_BYTES)
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"a frame's header has {len(header)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    payload_bytes = sum(size for _, size in sizes)
    return [PREFIX.pack(MAGIC, len(header), payload_bytes) + header, *blobs.values()]


def encode(
    meta: Mapping[str, Any], blobs: Mapping[str, Buffer] | None = None, kind: str = "", method: str = "", call: int = 0, trace: str = "",
    spans: Sequence[Any] = (),
) -> bytes:  # fmt: skip
    """Returns a frame as bytes. Raises ``ValueError`` where ``meta`` is not JSON."""
    return b"".join(encode_parts(meta, blobs, kind, method, call, trace, spans))


def frame_sizes(prefix: Buffer, limit_bytes: int = MAX_FRAME_BYTES) -> tuple[int, int]:
    """Returns the header and payload bytes that follow ``prefix`` (``PREFIX.size`` bytes). Raises ``ValueError`` past ``limit_bytes``."""
    magic, header_bytes, payload_bytes = PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise ValueError(f"not a frame: it starts with {magic!r}")
    if header_bytes > MAX_HEADER_BYTES or header_bytes + payload_bytes > limit_bytes:
        raise ValueError(f"a frame of {header_bytes} + {payload_bytes} bytes; at most {limit_bytes} are allowed")
    return header_bytes, payload_bytes


def decode(data: Buffer) -> Frame:
    """Returns the frame that ``data`` holds, whole and nothing more. Raises ``ValueError``."""
    if len(data) < PREFIX.size:
        raise ValueError(f"a frame of {len(data)} bytes is shorter than its prefix")
    header_bytes, payload_bytes = frame_sizes(data, len(data))
    if PREFIX.size + header_bytes + payload_bytes != len(data):
        raise ValueError(f"a frame of {len(data)} bytes says it has {PREFIX.size + header_bytes + payload_bytes}")
    return decode_body(memoryview(data)[PREFIX.size :], header_bytes)


def decode_body(body: Buffer, header_bytes: int) -> Frame:
    """Returns the frame whose header and payload are ``body``; its blobs are views of ``body``. Raises ``ValueError``."""
    view = memoryview(body)
    try:
        parsed = _from_json(str(view[:header_bytes], "utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a frame's header is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError("a frame's header is not an object")
    kind, meta, sizes = parsed.get("kind"), parsed.get("meta"), parsed.get("blobs")
    method, call = parsed.get("method", ""), parsed.get("call", 0)
    trace, spans = parsed.get("trace", ""), parsed.get("spans", ())
    if not isinstance(kind, str) or not isinstance(meta, dict) or not isinstance(sizes, list):
        raise ValueError("a frame's header lacks kind, meta or blobs")
    if not isinstance(method, str) or type(call) is not int:
        raise ValueError(f"a frame's method is {method!r} and its call {call!r}")
    if not isinstance(trace, str) or not isinstance(spans, list | tuple):
        raise ValueError("a frame's trace is no string, or its spans are no list")
    blobs: dict[str, Buffer] = {}
    at, end = header_bytes, len(view)
    for item in sizes:
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and type(item[1]) is int):
            raise ValueError(f"a frame's blob is described as {item!r}")
        name, size = item
        if size < 0 or size > end - at or name in blobs:
            raise ValueError(f"a frame's blob '{name}' of {size} bytes does not fit its payload")
        blobs[name] = view[at : at + size]
        at += size
    if at != end:
        raise ValueError(f"a frame's payload has {end - at} bytes too many")
    return Frame(meta, blobs, kind, method, call, trace, spans)
