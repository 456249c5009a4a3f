"""The manifest of a weight version: laid out before the copy, written as JSON, validated before anything is read."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, combinations

import xxhash

from tandem.layout.eagle3 import Eagle3Shapes, published_head
from tandem.layout.panels import is_in_panels
from tandem.layout.parameters import published_parameters
from tandem.layout.shapes import ModelShapes
from tandem.layout.shard_offsets import ShardOffsets, flat_range, intersection, whole_offsets
from tandem.types.dtypes import DTYPE_BYTES
from tandem.types.sample import WeightVersion
from tandem.types.weights import PartEntry, TensorEntry, WeightManifest

ALIGNMENT_BYTES = 64
_DIGEST, _SEGMENT = re.compile(r"[0-9a-f]{32}"), re.compile(r"[\w.-]+")


def aligned(size_bytes: int) -> int:
    """Returns the next multiple of 64: a cache line, and the widest vector load."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def place(sizes: Iterable[int]) -> list[int]:
    """Returns the offset of each tensor, one after another, each aligned."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = aligned(end + size)
    return offsets


def segment_bytes(shapes: ModelShapes, dtype: str, head: Eagle3Shapes | None = None) -> int:
    """Returns the bytes of a segment with every tensor of the Hugging Face form, and of a draft ``head`` that is trained beside the model, one after another,
    each aligned."""
    published = [*published_parameters(shapes), *(() if head is None else published_head(head))]
    return sum(aligned(parameter.numel * DTYPE_BYTES[dtype]) for parameter in published)


def offsets_of(part: PartEntry) -> ShardOffsets:
    return ShardOffsets(part.start, part.stop)


def part_offsets(entry: TensorEntry) -> list[int]:
    """Returns the offset of each part in the segment, in bytes."""
    if len(entry.parts) == 1:
        return [entry.offset_bytes]
    itemsize = DTYPE_BYTES[entry.dtype]
    sizes = [offsets_of(part).numel * itemsize for part in entry.parts]
    return list(accumulate(sizes[:-1], initial=entry.offset_bytes))


def total_digest(tensors: Iterable[TensorEntry]) -> str:
    """Returns the xxh3-128, in hexadecimal, over every entry's name, dtype and shape and its parts' offsets in the tensor and digests, in
    order. The segment, byte offsets and owners are not included, so that the same weights have the same digest in either buffer."""
    lines = [[t.name, t.dtype, t.shape, [[p.digest, *_corners(p, t)] for p in t.parts], *_layout(t)] for t in tensors]
    return str(xxhash.xxh3_128_hexdigest(json.dumps(lines, separators=(",", ":")).encode("ascii")))


def _corners(part: PartEntry, entry: TensorEntry) -> tuple[tuple[int, ...], ...]:
    """Returns the corners of a part; empty if the tensor has a single part, which is all of it."""
    return (part.start, part.stop) if len(entry.parts) > 1 else ()


def _layout(entry: TensorEntry) -> tuple[str, ...]:
    """Returns the layout of a tensor; nothing if it is row-major, as most are."""
    return () if entry.layout == "rows" else (entry.layout,)


def make_manifest(version: WeightVersion, tensors: Iterable[TensorEntry]) -> WeightManifest:
    entries = tuple(tensors)
    return WeightManifest(version, entries, total_digest(entries))


def to_json(manifest: WeightManifest) -> bytes:
    tensors = [
        [t.name, t.dtype, t.shape, t.segment, t.offset_bytes, t.size_bytes, [[p.owner, p.digest, *_corners(p, t)] for p in t.parts], *_layout(t)]
        for t in manifest.tensors
    ]
    plain = {"version": list(manifest.version), "digest": manifest.digest, "tensors": tensors}
    return json.dumps(plain, separators=(",", ":")).encode("ascii")


def from_json(data: bytes) -> WeightManifest:
    """Parses a manifest. Raises ``ValueError`` if ``data`` is not a manifest or is inconsistent."""
    try:
        plain = json.loads(data)
    except ValueError as error:
        raise ValueError(f"the weights' manifest is not JSON: {error}") from None
    if not isinstance(plain, dict) or set(plain) != {"version", "digest", "tensors"}:
        raise ValueError("the weights' manifest has no version, digest or tensors")
    version = plain["version"]
    if not (isinstance(version, list) and len(version) == 2 and all(type(part) is int for part in version)):
        raise ValueError(f"the weights' manifest has the invalid version {version!r}")
    if not isinstance(plain["tensors"], list):
        raise ValueError("the weights' manifest has no list of tensors")
    manifest = WeightManifest(WeightVersion(*version), tuple(_entry(item) for item in plain["tensors"]), plain["digest"])
    check(manifest)
    return manifest


def _entry(item: object) -> TensorEntry:
    if isinstance(item, list) and (len(item) == 7 or (len(item) == 8 and item[7] == "panels")):
        name, dtype, shape, segment, offset_bytes, size_bytes, parts, *_ = item
        texts = type(name) is type(dtype) is type(segment) is str
        if texts and _are_counts([offset_bytes, size_bytes, *shape] if isinstance(shape, list) else None) and isinstance(parts, list):
            whole = tuple(shape)
            checked = tuple([_part(part, whole, item) for part in parts])
            return TensorEntry(name, dtype, whole, segment, offset_bytes, size_bytes, checked, "rows" if len(item) == 7 else "panels")
    raise ValueError(f"the weights' manifest has the invalid entry {item!r}")


def _part(part: object, whole: tuple[int, ...], item: object) -> PartEntry:
    if isinstance(part, list) and len(part) in (2, 4):
        owner, digest, start, stop = part if len(part) == 4 else (*part, [0] * len(whole), list(whole))
        if _are_counts([owner]) and isinstance(digest, str) and (len(part) == 2 or (_are_counts(start) and _are_counts(stop))):
            return PartEntry(owner, tuple(start), tuple(stop), digest)
    raise ValueError(f"the weights' manifest has the invalid part {part!r} in the entry {item!r}")


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and set(map(type, values)) <= {int} and min(values, default=0) >= 0


def check(manifest: WeightManifest) -> None:
    """Raises ``ValueError`` if a name is listed twice, a size does not follow from its shape, a segment's name is a path, tensors overlap,
    the parts of a tensor do not cover it exactly once or cut its panels, or the digest does not match the entries."""
    names: set[str] = set()
    ends: dict[str, int] = {}
    for entry in sorted(manifest.tensors, key=lambda t: (t.segment, t.offset_bytes)):
        if entry.name in names:
            raise ValueError(f"the weights' manifest has '{entry.name}' twice")
        names.add(entry.name)
        if entry.dtype not in DTYPE_BYTES or math.prod(entry.shape) * DTYPE_BYTES[entry.dtype] != entry.size_bytes:
            what = f"'{entry.name}' of {entry.dtype} {list(entry.shape)}"
            raise ValueError(f"the weights' manifest: {what} says {entry.size_bytes} bytes")
        where = f"'{entry.name}' in segment {entry.segment!r} at {entry.offset_bytes}"
        if not _SEGMENT.fullmatch(entry.segment):
            raise ValueError(f"the weights' manifest: {where} is not in a segment of that name")
        for part in entry.parts:
            if not _DIGEST.fullmatch(part.digest):
                raise ValueError(f"the weights' manifest: {where} with digest {part.digest!r}")
        if not are_partition(entry.shape, [offsets_of(part) for part in entry.parts]):
            raise ValueError(f"the weights' manifest: the parts of {where} do not cover its shape {list(entry.shape)} once, in order")
        if entry.layout == "panels" and not is_in_panels(entry.dtype, entry.shape, [offsets_of(part) for part in entry.parts]):
            raise ValueError(f"the weights' manifest: {where} has parts that are not whole panels")
        if entry.offset_bytes % ALIGNMENT_BYTES or entry.offset_bytes < ends.get(entry.segment, 0):
            raise ValueError(f"the weights' manifest: {where} is unaligned or overlaps another")
        ends[entry.segment] = entry.offset_bytes + entry.size_bytes
    if total_digest(manifest.tensors) != manifest.digest:
        raise ValueError("the weights' manifest does not match its own digest")


def are_partition(shape: tuple[int, ...], parts: Sequence[ShardOffsets]) -> bool:
    """Returns whether ``parts`` contain every element of a tensor of ``shape`` exactly once and are in the order of their ``start``."""
    whole = whole_offsets(shape)
    if len(parts) == 1:
        return parts[0] == whole
    for part in parts:
        if len(part.start) != len(shape) or len(part.stop) != len(shape) or intersection(part, whole) != part:
            return False
    starts = [part.start for part in parts]
    if starts != sorted(starts) or sum(part.numel for part in parts) != whole.numel:
        return False
    ranges = [flat_range(shape, part) for part in parts]
    if None not in ranges:
        # Runs of row-major memory with the right total cover it exactly once if none begins before the end of the previous one.
        ends = list(accumulate(part.numel for part in parts))
        return [run.stop for run in ranges if run is not None] == ends
    return all(intersection(a, b) is None for a, b in combinations(parts, 2))
