"""The manifest of a weight version: laid out before the copy, written as JSON, checked before anything is read."""

import json
import re
from collections.abc import Iterable
from dataclasses import fields

import xxhash

from tandem.estimate.model_bytes import DTYPE_BYTES
from tandem.layout.shapes import ModelShapes, parameters
from tandem.types.sample import WeightVersion
from tandem.types.weights import TensorEntry, WeightManifest

ALIGNMENT_BYTES = 64
_FIELDS = tuple(field.name for field in fields(TensorEntry))


def aligned(size_bytes: int) -> int:
    """The next multiple of 64: a cache line, and the widest vector load."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def segment_bytes(shapes: ModelShapes, dtype: str) -> int:
    """Bytes of a segment that holds every tensor of the Hugging Face form, one behind the other, each aligned."""
    return sum(aligned(parameter.numel * DTYPE_BYTES[dtype]) for parameter in parameters(shapes))


def total_digest(tensors: Iterable[TensorEntry]) -> str:
    """The xxh3-128, in hexadecimal, over every entry's name, dtype, shape and digest, in order. Where the bytes lie is
    not part of it: the same weights have the same digest in either buffer."""
    lines = [[t.name, t.dtype, t.shape, t.digest] for t in tensors]
    return str(xxhash.xxh3_128_hexdigest(json.dumps(lines, separators=(",", ":")).encode("ascii")))


def make_manifest(version: WeightVersion, tensors: Iterable[TensorEntry]) -> WeightManifest:
    entries = tuple(tensors)
    return WeightManifest(version, entries, total_digest(entries))


def to_json(manifest: WeightManifest) -> bytes:
    tensors = [{name: getattr(entry, name) for name in _FIELDS} for entry in manifest.tensors]
    plain = {"version": list(manifest.version), "digest": manifest.digest, "tensors": tensors}
    return json.dumps(plain, separators=(",", ":")).encode("ascii")


def from_json(data: bytes) -> WeightManifest:
    """Raises ``ValueError`` where ``data`` is no manifest or one that contradicts itself."""
    try:
        plain = json.loads(data)
    except ValueError as error:
        raise ValueError(f"the weights' manifest is not JSON: {error}") from None
    if not isinstance(plain, dict) or set(plain) != {"version", "digest", "tensors"}:
        raise ValueError("the weights' manifest lacks version, digest or tensors")
    version = plain["version"]
    if not (isinstance(version, list) and len(version) == 2 and all(type(part) is int for part in version)):
        raise ValueError(f"the weights' manifest has the version {version!r}")
    if not isinstance(plain["tensors"], list):
        raise ValueError("the weights' manifest has no list of tensors")
    manifest = WeightManifest(WeightVersion(*version), tuple(_entry(item) for item in plain["tensors"]), plain["digest"])
    check(manifest)
    return manifest


def _entry(item: object) -> TensorEntry:
    if not isinstance(item, dict) or set(item) != set(_FIELDS):
        raise ValueError(f"the weights' manifest has the entry {item!r}")
    texts = all(isinstance(item[name], str) for name in ("name", "dtype", "segment", "digest"))
    counts = all(type(item[name]) is int and item[name] >= 0 for name in ("offset_bytes", "size_bytes"))
    shape = item["shape"]
    if not texts or not counts or not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"the weights' manifest has the entry {item!r}")
    return TensorEntry(**{**item, "shape": tuple(shape)})


def check(manifest: WeightManifest) -> None:
    """Raises ``ValueError`` where a name is there twice, a size does not follow from its shape, a segment's name is a
    path, tensors overlap, or the digest is not that of the entries."""
    names: set[str] = set()
    ends: dict[str, int] = {}
    for entry in sorted(manifest.tensors, key=lambda t: (t.segment, t.offset_bytes)):
        size = DTYPE_BYTES.get(entry.dtype, 0)
        for count in entry.shape:
            size *= count
        if entry.name in names:
            raise ValueError(f"the weights' manifest has '{entry.name}' twice")
        names.add(entry.name)
        if entry.dtype not in DTYPE_BYTES or size != entry.size_bytes:
            what = f"'{entry.name}' of {entry.dtype} {list(entry.shape)}"
            raise ValueError(f"the weights' manifest: {what} says {entry.size_bytes} bytes")
        where = f"'{entry.name}' in segment {entry.segment!r} at {entry.offset_bytes}"
        if not re.fullmatch(r"[\w.-]+", entry.segment) or not re.fullmatch(r"[0-9a-f]{32}", entry.digest):
            raise ValueError(f"the weights' manifest: {where} with digest {entry.digest!r}")
        if entry.offset_bytes % ALIGNMENT_BYTES or entry.offset_bytes < ends.get(entry.segment, 0):
            raise ValueError(f"the weights' manifest: {where} is unaligned or overlaps another")
        ends[entry.segment] = entry.offset_bytes + entry.size_bytes
    if total_digest(manifest.tensors) != manifest.digest:
        raise ValueError("the weights' manifest does not have the digest that it says")
