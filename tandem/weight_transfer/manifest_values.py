"""The manifest of a weight version as values of the coordination store: small ones as they are, larger ones compressed, and in several keys where one cannot
hold them. A request to etcd has at most 1.5 MiB, and a model with many experts has tens of thousands of tensors.

The keys of a manifest in several are named for the digest of its bytes and written before the publication refers to them, so that a reader finds all of
one manifest or is told that it has been replaced.
"""

import contextlib
import json
import zlib
from collections.abc import Iterator

import xxhash

from tandem.runtime.coordination.store import Store
from tandem.types.weights import WeightManifest
from tandem.weight_transfer.manifest import from_json, to_json

PLAIN_BYTES = 256 * 1024
"""A manifest up to this size is stored as it is."""
VALUE_BYTES = 2**20
"""The largest value of a key."""
PREFIX = "weights/manifests/"
_COMPRESSED, _IN_KEYS = b"Z", b"K"
_MOST_BYTES = 2**30
"""Of a decompressed manifest: far above any model's, so that damaged bytes do not fill the memory."""


class KeysGone(Exception):
    """The keys of a manifest are not all there: another one has been published since, or the store was damaged."""


def to_value(store: Store, manifest: WeightManifest) -> bytes:
    """Returns the value of ``manifest`` in the store, after the keys that it refers to have been written."""
    plain = to_json(manifest)
    if len(plain) <= PLAIN_BYTES:
        return plain
    packed = zlib.compress(plain, 1)
    if len(packed) < VALUE_BYTES:
        return _COMPRESSED + packed
    count, name = -(-len(packed) // VALUE_BYTES), str(xxhash.xxh3_128_hexdigest(packed))
    for number, key in enumerate(_keys(name, count)):
        store.put(key, packed[number * VALUE_BYTES : (number + 1) * VALUE_BYTES])
    return _IN_KEYS + json.dumps([name, count]).encode("ascii")


def from_value(store: Store, value: bytes) -> WeightManifest:
    """Returns the manifest of a value. Raises ``ValueError`` if it is none, ``KeysGone`` if its keys are not there."""
    if value[:1] == _IN_KEYS:
        name, count = _reference(value)
        entries = [store.get(key) for key in _keys(name, count)]
        if any(entry is None for entry in entries):
            raise KeysGone(f"the weights' manifest {name} is not there any more")
        packed = b"".join(entry.value for entry in entries if entry is not None)
        if str(xxhash.xxh3_128_hexdigest(packed)) != name:
            raise ValueError(f"the weights' manifest {name} does not have its digest")
    elif value[:1] == _COMPRESSED:
        packed = value[1:]
    else:
        return from_json(value)
    unpacking = zlib.decompressobj()
    try:
        plain = unpacking.decompress(packed, _MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"the weights' manifest cannot be decompressed: {error}") from None
    if not unpacking.eof:
        raise ValueError("the weights' manifest is incomplete")
    return from_json(plain)


def is_in_keys(value: bytes) -> bool:
    return value[:1] == _IN_KEYS


def discard(store: Store, value: bytes | None, kept: bytes | None) -> None:
    """Removes the keys that ``value`` refers to, unless ``kept`` is the same. What is damaged refers to nothing."""
    if value is not None and value != kept and is_in_keys(value):
        with contextlib.suppress(ValueError):
            for key in _keys(*_reference(value)):
                store.delete(key)


def _reference(value: bytes) -> tuple[str, int]:
    """Returns the name and the number of the keys."""
    found = json.loads(value[1:])
    match found:
        case [str(name), int(count)] if 0 < count <= _MOST_BYTES // VALUE_BYTES:
            return name, count
    raise ValueError(f"the weights' manifest refers to the keys {str(found)[:200]}")


def _keys(name: str, count: int) -> Iterator[str]:
    return (f"{PREFIX}{name}/{number:04d}" for number in range(count))
