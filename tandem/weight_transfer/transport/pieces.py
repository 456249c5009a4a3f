"""What one pod reads from another: parts of tensors, each with its progress and the digest of what has arrived. No torch."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import xxhash

from tandem.layout.shard_offsets import whole_offsets
from tandem.runtime.process.deadline import Deadline
from tandem.types.dtypes import DTYPE_BYTES
from tandem.types.errors import RunError
from tandem.types.weights import WeightManifest
from tandem.weight_transfer.manifest import offsets_of, part_offsets
from tandem.weight_transfer.shared_memory import Contents

BUCKET_BYTES = 16 * 2**20
"""Pieces are asked for together until they have as many bytes, so that a request costs little and another connection can take the next."""


class SourceLost(Exception):
    """The connection to the other pod broke. Pieces keep what has arrived, and can be read on."""


class VersionMoved(RunError):
    """The other pod does not hold these weights any more: a newer version has taken their memory."""


class SourceStuck(RunError):
    """A transfer that was begun did not end and cannot be called back: it may still write to our memory, which must not be used again."""


class Piece:
    """A part of a tensor in the segment of another pod, which is read to the same offset of our own.

    ``name``: for messages; ``expected``: its xxh3-128 in the manifest. ``done_bytes`` have arrived and are digested. ``sender``: the pod that it
    was asked of last, as its source calls it; ``altered_by``: those from which all of it has arrived with another digest.
    """

    __slots__ = ("_digest", "altered_by", "done_bytes", "expected", "name", "offset_bytes", "sender", "size_bytes")

    def __init__(self, name: str, offset_bytes: int, size_bytes: int, expected: str) -> None:
        self.name, self.offset_bytes, self.size_bytes, self.expected = name, offset_bytes, size_bytes, expected
        self.sender, self.altered_by = "", set[str]()
        self.restart()

    def restart(self) -> None:
        """Begins again with the first byte."""
        self.done_bytes, self._digest = 0, xxhash.xxh3_128()

    def go_on(self, before: "Piece") -> None:
        """Begins with what has come of ``before``, which is the same part."""
        self.sender, self.done_bytes, self._digest = before.sender, before.done_bytes, before._digest

    @property
    def missing(self) -> tuple[int, int]:
        """Returns offset and bytes of what has not arrived."""
        return self.offset_bytes + self.done_bytes, self.size_bytes - self.done_bytes

    @property
    def is_complete(self) -> bool:
        return self.done_bytes == self.size_bytes

    @property
    def is_verified(self) -> bool:
        return self.is_complete and self._digest.hexdigest() == self.expected

    def arrived(self, memory: memoryview, count: int) -> None:
        """Digests the next ``count`` bytes, which are in ``memory`` now."""
        at = self.offset_bytes + self.done_bytes
        self._digest.update(memory[at : at + count])
        self.done_bytes += count


class Source(Protocol):
    """Reads the segments of another pod, whatever the bytes are carried by."""

    def read(self, segment: str, contents: Contents, pieces: Sequence[Piece], into: memoryview, deadline: Deadline) -> None:
        """Reads what is missing of ``pieces`` from ``segment``, which holds ``contents``, to the same offsets of ``into``, and digests it.

        Raises ``SourceLost`` where the connection broke or the other side was silent for too long, ``VersionMoved``, ``SourceStuck``, ``TimeoutError`` past
        the deadline, and ``RunError`` where the other side refuses, as for a wrong credential. What has arrived until then stays.
        """

    def close(self) -> None: ...


def pieces_of(manifest: WeightManifest) -> list[Piece]:
    """Returns every part of every tensor, in the order of their offsets."""
    pieces = []
    for entry in manifest.tensors:
        itemsize, whole = DTYPE_BYTES[entry.dtype], whole_offsets(entry.shape)
        for number, (part, offset) in enumerate(zip(entry.parts, part_offsets(entry), strict=True)):
            held = offsets_of(part)
            name = f"'{entry.name}'" if held == whole else f"part {number} of '{entry.name}'"
            pieces.append(Piece(name, offset, held.numel * itemsize, part.digest))
    return sorted(pieces, key=lambda piece: piece.offset_bytes)


def buckets_of(pieces: Sequence[Piece], limit_bytes: int = BUCKET_BYTES) -> Iterator[list[Piece]]:
    """Groups pieces until each group misses ``limit_bytes``. A piece is never divided, because its digest is computed in order."""
    bucket: list[Piece] = []
    for piece in pieces:
        bucket.append(piece)
        if sum(each.missing[1] for each in bucket) >= limit_bytes:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
