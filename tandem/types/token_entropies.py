"""The entropies of a step's tokens between processes and in files: by the id of a sequence, half-precision floats in nats, little-endian, one for each token of
its completion; NaN where none was recorded."""

import struct
from collections.abc import Mapping, Sequence

from tandem.types.wire import Buffer, decode, encode

TokenEntropies = Mapping[str, Buffer]
_KIND = "entropies"


def pack_halves(values: Sequence[float]) -> bytes:
    """Returns ``values`` (at most 65504 each) as half-precision floats."""
    return struct.pack(f"<{len(values)}e", *values)


def unpack_halves(data: Buffer) -> list[float]:
    """Returns the values of ``pack_halves``. Raises ``ValueError``."""
    try:
        return list(struct.unpack(f"<{len(data) // 2}e", data))
    except struct.error as error:
        raise ValueError(f"not half-precision floats: {error}") from None


def encode_entropies(entropies: TokenEntropies) -> bytes:
    return encode({}, entropies, _KIND)


def decode_entropies(data: Buffer) -> TokenEntropies:
    """Returns what ``encode_entropies`` was given. Raises ``ValueError`` for other bytes."""
    frame = decode(data)
    if frame.kind != _KIND:
        raise ValueError(f"expected {_KIND}, got a frame of '{frame.kind}'")
    return frame.blobs
