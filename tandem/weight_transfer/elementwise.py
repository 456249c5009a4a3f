"""The elements of a part that differ between two versions, encoded: their positions and their new values. No torch.

In bf16 at the learning rates of reinforcement learning about 99 % of the elements keep their bits in a step, because most updates are smaller than half the
distance between two neighbouring bf16 numbers (arXiv 2602.03839); those that change go to a neighbour, most of them. Elements are read as unsigned integers
of their size. A block of them is encoded as

    header: changed elements, bytes of positions, bytes of codes, elements in full (four uint32, little endian)
    positions: the gaps between changed elements, one byte each; 255 is a gap of 255 that goes on
    codes: one byte each, the zigzag of new minus old; 255 is an element in full
    elements in full, as they are

A block of which that would be more than half is there as it is, behind a header of four times 2^32 - 1. Positions and codes are Huffman-coded (deflate): gaps
have a geometric distribution and codes are 1 and 2, mostly.
"""

import ctypes
import importlib.util
import struct
import zlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import xxhash

Array: TypeAlias = Any
"""One of numpy."""
BLOCK_ELEMENTS = 2**18
"""Of a block, whose old and new elements stay in the processor's cache."""
_HEADER = struct.Struct("<4I")
_WHOLE = _HEADER.pack(*[2**32 - 1] * 4)
_MORE = 255
_SMALL = 256
"""Bytes, of which headers may take any share."""


def is_available() -> bool:
    """Returns whether numpy is installed. Only what encodes and applies imports it: it would make a shim that has no use for it 16 MiB larger and its start
    slower."""
    return importlib.util.find_spec("numpy") is not None


def encode(old: int, new: int, size_bytes: int, item_bytes: int) -> bytes | None:
    """Returns what turns the ``size_bytes`` at address ``old`` into those at ``new``, both of elements of ``item_bytes``; ``None`` if that would not be
    smaller than half of them."""
    import numpy as np

    encoded, block_bytes, total = list[bytes](), BLOCK_ELEMENTS * item_bytes, 0
    for at in range(0, size_bytes, block_bytes):
        count = min(block_bytes, size_bytes - at)
        before, after = _elements(old + at, count, item_bytes), _elements(new + at, count, item_bytes)
        where = np.flatnonzero(before != after)
        # Where so many have changed, as in fp32, positions and values would be no smaller.
        block = b"" if 4 * len(where) > count else _encode_block(before[where], after[where], where)
        encoded.append(block if block and 2 * len(block) <= max(count, _SMALL) else _WHOLE + after.tobytes())
        total += len(encoded[-1])
        if 2 * total > max(size_bytes, _SMALL):
            return None
    return b"".join(encoded)


def apply(encoded: memoryview, base: int, into: int, size_bytes: int, item_bytes: int) -> str:
    """Writes the new version of the ``size_bytes`` at address ``base`` to ``into``, which may be the same; returns the xxh3-128 of it, in hexadecimal. Raises
    ``ValueError`` if ``encoded`` is not of so many elements; what is at ``into`` is then undefined."""
    digest, block_bytes, at = xxhash.xxh3_128(), BLOCK_ELEMENTS * item_bytes, 0
    for positions, codes, full in _blocks(encoded, size_bytes, item_bytes):
        count = min(block_bytes, size_bytes - at)
        elements = _elements(into + at, count, item_bytes)
        if positions is None:
            elements[:] = full
        else:
            if base != into:
                ctypes.memmove(into + at, base + at, count)
            elements[positions] = _decode_values(elements[positions], codes, full)
        digest.update((ctypes.c_char * count).from_address(into + at))
        at += count
    return digest.hexdigest()


def changed_positions(encoded: memoryview, size_bytes: int, item_bytes: int) -> Array:
    """Returns the indices of the elements among those of the part that may have changed, ascending. Raises ``ValueError`` as ``apply``."""
    import numpy as np

    found: list[Array] = [np.zeros(0, np.int64)]
    for i, (positions, _, full) in enumerate(_blocks(encoded, size_bytes, item_bytes)):
        found.append((np.arange(len(full)) if positions is None else positions) + i * BLOCK_ELEMENTS)
    together: Array = np.concatenate(found)
    return together


def _elements(address: int, size_bytes: int, item_bytes: int) -> Array:
    """Returns a view of memory as unsigned integers."""
    import numpy as np

    elements: Array = np.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=f"<u{item_bytes}")
    return elements


def _encode_block(before: Array, after: Array, where: Array) -> bytes:
    """``before`` and ``after``: the changed elements alone, at the positions ``where`` of the block."""
    import numpy as np

    gaps: Array = np.diff(where, prepend=-1) - 1
    ends = np.cumsum(gaps // _MORE + 1) - 1
    positions: Array = np.full(int(ends[-1]) + 1 if len(ends) else 0, _MORE, np.uint8)
    positions[ends] = gaps % _MORE
    signed = (after - before).view(f"<i{before.itemsize}")
    zigzag = ((signed << 1) ^ (signed >> (8 * before.itemsize - 1))).view(before.dtype)
    is_full = zigzag >= _MORE
    codes = np.where(is_full, _MORE, zigzag).astype(np.uint8)
    packed_positions, packed_codes, full = _deflate(positions.tobytes()), _deflate(codes.tobytes()), after[is_full]
    return b"".join((_HEADER.pack(len(where), len(packed_positions), len(packed_codes), len(full)), packed_positions, packed_codes, full.tobytes()))


def _blocks(encoded: memoryview, size_bytes: int, item_bytes: int) -> Iterator[tuple[Any, Any, Any]]:
    """Yields the positions, codes and elements in full of every block, validated; ``None`` for the positions of one that is there as it is."""
    import numpy as np

    at = 0
    for first in range(0, size_bytes, BLOCK_ELEMENTS * item_bytes):
        elements = min(BLOCK_ELEMENTS, (size_bytes - first) // item_bytes)
        if at + _HEADER.size > len(encoded):
            raise ValueError("it ends too early")
        if encoded[at : at + _HEADER.size] == _WHOLE:
            end = at + _HEADER.size + elements * item_bytes
            if end > len(encoded):
                raise ValueError("it ends too early")
            yield None, None, np.frombuffer(encoded[at + _HEADER.size : end], f"<u{item_bytes}")
            at = end
            continue
        changed, position_bytes, code_bytes, full_count = _HEADER.unpack_from(encoded, at)
        codes_at = at + _HEADER.size + position_bytes
        full_at = codes_at + code_bytes
        end = full_at + full_count * item_bytes
        if changed > elements or end > len(encoded):
            raise ValueError("a block's header is wrong")
        # No more bytes than gaps that could be: one for each changed element, and one for every 255 elements.
        steps = np.frombuffer(_inflate(encoded[at + _HEADER.size : codes_at], changed + elements // _MORE), np.uint8)
        codes = np.frombuffer(_inflate(encoded[codes_at:full_at], changed), np.uint8)
        full = np.frombuffer(encoded[full_at:end], f"<u{item_bytes}")
        is_end = steps != _MORE
        positions = (np.cumsum(steps.astype(np.int64) + is_end) - 1)[is_end]
        wrong = len(positions) != changed or len(codes) != changed or int((codes == _MORE).sum()) != full_count
        if wrong or (changed and (int(positions[-1]) >= elements or not is_end[-1])):
            raise ValueError("a block's positions or codes are wrong")
        yield positions, codes, full
        at = end
    if at != len(encoded):
        raise ValueError("something follows its last block")


def _decode_values(old: Array, codes: Array, full: Array) -> Array:
    zigzag: Array = codes.astype(old.dtype)
    new: Array = old + ((zigzag >> 1) ^ -(zigzag & 1))
    new[codes == _MORE] = full
    return new


def _deflate(plain: bytes) -> bytes:
    packing = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return packing.compress(plain) + packing.flush()


def _inflate(packed: memoryview, most_bytes: int) -> bytes:
    unpacking = zlib.decompressobj(-15)
    try:
        plain = unpacking.decompress(packed, most_bytes + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(plain) > most_bytes or not unpacking.eof:
        raise ValueError("it does not end where it should")
    return plain
