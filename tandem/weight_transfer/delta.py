"""Element-wise deltas of weights: a file that turns parts of one version into those of the next, in shared memory or in object storage. No torch.

The file begins with an index in JSON, a list with an entry for each part that has an encoding (``elementwise``); the encodings follow. Parts are named by
their digests, as everywhere: an entry turns the part with the digest ``base``, wherever a reader has it, into the one with the digest ``target``. A reader
that has no such part reads the whole one. A version's file is found by one key of the store, beside the manifest.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import xxhash

from tandem.layout.shard_offsets import ShardOffsets
from tandem.runtime.coordination.store import Store
from tandem.types.dtypes import DTYPE_BYTES
from tandem.types.errors import RunError
from tandem.types.sample import WeightVersion
from tandem.types.weights import WeightManifest
from tandem.weight_transfer import elementwise
from tandem.weight_transfer.copying import Threads, address_of
from tandem.weight_transfer.manifest import offsets_of, part_offsets
from tandem.weight_transfer.shared_memory import Contents, Segment, contents_of

logger = logging.getLogger(__name__)
KEY = "weights/delta"
_MOST_INDEX_BYTES = 2**28
_SLACK = 1.25


class EncodedPart(NamedTuple):
    """What turns the part with the digest ``base`` into the one with ``target``, both of ``part_bytes`` in elements of ``item_bytes``: ``size_bytes`` from
    ``offset_bytes`` behind the index on, with the xxh3-128 ``digest``."""

    target: str
    base: str
    part_bytes: int
    item_bytes: int
    offset_bytes: int
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class DeltaReference:
    """The file that leads to the weights ``target``: its first ``size_bytes`` in the shared memory ``segment``. The first ``index_bytes`` are the index, with
    the xxh3-128 ``digest``, by which the file is known."""

    segment: str
    size_bytes: int
    index_bytes: int
    digest: str
    target: Contents

    @property
    def contents(self) -> Contents:
        """The label of the segment."""
        return Contents(self.target.version, self.digest)


def publish_reference(store: Store, reference: DeltaReference | None) -> None:
    """Makes ``reference`` the one that readers find; ``None``: they find none."""
    if reference is not None:
        plain = {**asdict(reference), "target": [*reference.target.version, reference.target.digest]}
        store.put(KEY, json.dumps(plain, separators=(",", ":")).encode("ascii"))
    elif store.get(KEY) is not None:
        store.delete(KEY)


def reference_to(store: Store, manifest: WeightManifest) -> DeltaReference | None:
    """Returns the file that leads to ``manifest``; ``None`` if there is none, or its key is damaged."""
    entry = store.get(KEY)
    if entry is None:
        return None
    try:
        plain = json.loads(entry.value)
        incarnation, step, digest = plain["target"]
        target = Contents(WeightVersion(int(incarnation), int(step)), str(digest))
        reference = DeltaReference(str(plain["segment"]), int(plain["size_bytes"]), int(plain["index_bytes"]), str(plain["digest"]), target)
    except (ValueError, KeyError, TypeError):
        logger.warning("the key '%s' of the coordination store is damaged; weights are read whole", KEY)
        return None
    is_sound = 0 < reference.index_bytes <= min(reference.size_bytes, _MOST_INDEX_BYTES)
    return reference if target == contents_of(manifest) and is_sound else None


class Delta:
    """The file of ``reference`` in ``memory``, whose index has been read."""

    def __init__(self, reference: DeltaReference, memory: memoryview) -> None:
        """Raises ``ValueError`` if the index does not have its digest."""
        index = bytes(memory[: reference.index_bytes])
        if xxhash.xxh3_128_hexdigest(index) != reference.digest:
            raise ValueError("the index of the delta does not have its digest")
        self.reference, self._memory = reference, memory
        parts = [EncodedPart(*plain) for plain in json.loads(index)]
        for part in parts:
            if not 0 <= part.offset_bytes <= reference.size_bytes - reference.index_bytes - part.size_bytes:
                raise ValueError("a part of the delta lies outside it")
        self.parts: Mapping[tuple[str, int], EncodedPart] = {(part.target, part.part_bytes): part for part in parts}

    def encoding(self, part: EncodedPart) -> memoryview:
        """Returns the encoding of ``part``. Raises ``ValueError`` if it does not have its digest."""
        encoding = self._memory[self.reference.index_bytes + part.offset_bytes :][: part.size_bytes]
        if xxhash.xxh3_128_hexdigest(encoding) != part.digest:
            raise ValueError("the delta of this part is damaged")
        return encoding

    def apply(self, part: EncodedPart, base: int, into: int) -> None:
        """Writes the part with the digest ``part.target`` to the address ``into``, from the one with ``part.base`` at ``base``, which may be the same. Raises
        ``ValueError`` if that is not what comes of it, because the encoding or the base is damaged; then what is at ``into`` is of no use."""
        if elementwise.apply(self.encoding(part), base, into, part.part_bytes, part.item_bytes) != part.target:
            raise ValueError("the elements before the update are not those that the delta begins with")


class DeltaMemory:
    """The shared memory of the files of one process, one after another: grown where one is larger than those before. ``create``: makes a segment of so many
    bytes."""

    def __init__(self, create: Callable[[int, int], Segment]) -> None:
        self._create = create
        # Those that have become too small stay until the end: somebody may be sending from them.
        self._segments: list[Segment] = []

    def begin(self, size_bytes: int) -> Segment:
        """Returns a segment of at least ``size_bytes`` without a label. Raises ``RunError`` if the shared memory is full."""
        if self._segments:
            self._segments[-1].contents = None
        if not self._segments or self._segments[-1].size_bytes < size_bytes:
            self._segments.append(self._create(len(self._segments), int(_SLACK * size_bytes)))
        return self._segments[-1]

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        self._segments.clear()


class DeltaWriter:
    """Makes the file from each published version to the next, in the process that owns the buffers of both. ``is_full``: whether a step's version is sent
    whole."""

    def __init__(self, segments: Sequence[Segment], memory: DeltaMemory, threads: int, is_full: Callable[[int], bool]) -> None:
        self._segments, self._memory, self._is_full = {segment.name: segment for segment in segments}, memory, is_full
        self._threads = Threads(threads)
        self._base: WeightManifest | None = None

    def write(self, manifest: WeightManifest) -> tuple[DeltaReference, Segment] | None:
        """Returns the file that leads to ``manifest``, which is published now, from the version of the last call, and the segment that it is in. ``None``:
        there is none, because this version is one of those that are sent whole or is published again, the version before is not in memory any more, or
        nothing would be saved. Raises ``RunError`` if the shared memory is full."""
        base, self._base = self._base, manifest
        if base is None or base.version == manifest.version or self._is_full(manifest.version.step) or not (self._has(base) and self._has(manifest)):
            return None
        jobs = self._jobs(base, manifest)
        encodings = self._threads.map(lambda job: elementwise.encode(job.old, job.new, job.part_bytes, job.item_bytes), jobs, [job.part_bytes for job in jobs])
        pairs = [(job, encoding) for job, encoding in zip(jobs, encodings, strict=True) if encoding is not None]
        # The trainer may have begun with the next version meanwhile, in the place of the base.
        if not pairs or not (self._has(base) and self._has(manifest)):
            return None
        index, payload = _index(pairs), [encoding for _, encoding in pairs]
        size_bytes = len(index) + sum(map(len, payload))
        segment, at = self._memory.begin(size_bytes), 0
        for each in (index, *payload):
            segment.memory[at : at + len(each)] = each
            at += len(each)
        reference = DeltaReference(segment.name, size_bytes, len(index), str(xxhash.xxh3_128_hexdigest(index)), contents_of(manifest))
        segment.contents = reference.contents
        return reference, segment

    def _has(self, manifest: WeightManifest) -> bool:
        names = {entry.segment for entry in manifest.tensors}
        return len(names) == 1 and all(name in self._segments and self._segments[name].contents == contents_of(manifest) for name in names)

    def _jobs(self, base: WeightManifest, manifest: WeightManifest) -> "list[_Job]":
        """Returns the parts that both versions have, with different digests."""
        before = {place: (at, digest) for place, at, digest in self._places(base)}
        jobs = []
        for place, at, digest in self._places(manifest):
            old, old_digest = before.get(place, (0, digest))
            if old_digest != digest:
                item_bytes = DTYPE_BYTES[place.dtype]
                jobs.append(_Job(digest, old_digest, place.offsets.numel * item_bytes, item_bytes, old, at))
        return jobs

    def _places(self, manifest: WeightManifest) -> "list[tuple[_Place, int, str]]":
        """Returns every part with its address and digest."""
        start = address_of(self._segments[manifest.tensors[0].segment].memory)
        return [
            (_Place(entry.name, entry.dtype, offsets_of(part)), start + offset, part.digest)
            for entry in manifest.tensors
            for part, offset in zip(entry.parts, part_offsets(entry), strict=True)
        ]

    def close(self) -> None:
        self._threads.close()
        self._memory.close()


class _Place(NamedTuple):
    name: str
    dtype: str
    offsets: ShardOffsets


class _Job(NamedTuple):
    """A part to encode; ``old`` and ``new`` are addresses."""

    target: str
    base: str
    part_bytes: int
    item_bytes: int
    old: int
    new: int


def _index(pairs: "Sequence[tuple[_Job, bytes]]") -> bytes:
    at, entries = 0, list[EncodedPart]()
    for job, encoding in pairs:
        digest = str(xxhash.xxh3_128_hexdigest(encoding))
        entries.append(EncodedPart(job.target, job.base, job.part_bytes, job.item_bytes, at, len(encoding), digest))
        at += len(encoding)
    return json.dumps(entries, separators=(",", ":")).encode("ascii")


class ReadDeltas:
    """Opens the files of other processes of this machine. ``store``: where they are found."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._segment: Segment | None = None

    def to(self, manifest: WeightManifest) -> Delta | None:
        """Returns the file that leads to ``manifest``; ``None`` if there is none that can be used."""
        reference = reference_to(self._store, manifest)
        if reference is None or not elementwise.is_available():
            return None
        try:
            if self._segment is None or self._segment.name != reference.segment:
                self.close()
                self._segment = Segment.open(reference.segment)
            if self._segment.contents != reference.contents or reference.size_bytes > self._segment.size_bytes:
                return None
            return Delta(reference, self._segment.memory)
        except (OSError, RunError, ValueError, TypeError) as error:
            logger.warning("the delta of the weights is not used: %s", error)
            return None

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
        self._segment = None
