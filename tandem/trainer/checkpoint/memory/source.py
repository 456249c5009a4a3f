"""Verifies and reads the files of a checkpoint that keepers of several nodes have."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tandem.runtime.collectives.communicator import Communicator
from tandem.runtime.rpc.calls import CallError
from tandem.storage.digests import bytes_digest, chunk_digest
from tandem.trainer.checkpoint.format.commit import MARKER
from tandem.trainer.checkpoint.format.manifest import MANIFEST, Damaged, Manifest, marker_of, parse_entry, parse_manifest
from tandem.trainer.checkpoint.format.rank_file import RankIndex
from tandem.trainer.checkpoint.memory.keepers import AT_ONCE, PIECE_BYTES, Keepers
from tandem.types import RunError, UserError
from tandem.types.wire import Buffer


@dataclass(frozen=True, slots=True)
class MemorySource:
    """The files of the checkpoint of ``step``, each with the keeper in ``where``. ``read``: the pieces that this rank has read, by file and offset,
    so that they are sent once; ``verified``: the chunks of them that have their digests. ``limit``: how many pieces are held (``None``: all); then a chunk that
    is read again is verified again."""

    keepers: Keepers
    step: int
    where: Mapping[str, int]
    read: dict[tuple[str, int], memoryview] = field(default_factory=dict)
    verified: set[tuple[str, int]] = field(default_factory=set)
    limit: int | None = None

    def small(self, name: str) -> bytes:
        """Returns a whole file. Raises ``Damaged`` if it cannot be read."""
        return bytes(self._read(name))

    def pread(self, name: str, size: int, offset: int) -> memoryview:
        """Returns ``size`` bytes of a file at ``offset``, which one piece holds. Raises ``Damaged`` if they cannot be read."""
        first = offset // PIECE_BYTES * PIECE_BYTES
        piece = self.read.get((name, first))
        if piece is None:
            piece = memoryview(self._read(name, first, PIECE_BYTES))
            for place in [] if self.limit is None else list(self.read)[: 1 - self.limit]:
                self.read.pop(place, None)
            self.read[name, first] = piece
        if self.limit is not None:
            self.verified.clear()
        return piece[offset - first : offset - first + size]

    def forget(self) -> None:
        self.read.clear()

    def _read(self, name: str, offset: int = 0, size: int | None = None) -> Buffer:
        try:
            return self.keepers.read(self.where[name], self.step, name, offset, size)
        except (CallError, UserError, RunError) as error:
            raise Damaged(f"'{name}' cannot be read from the {self.keepers.place} of node {self.keepers.names[self.where[name]]}: {error}") from None


class Verified(NamedTuple):
    """The files that a rank has verified: the keeper of each, their bytes and the pieces that were ``read``; the manifest and its digest."""

    where: dict[str, int]
    size_bytes: int
    manifest: Manifest
    digest: str
    read: dict[tuple[str, int], memoryview]
    verified: set[tuple[str, int]]


def verified_files(
    keepers: Keepers, ranks: Communicator, step: int, nodes: Mapping[int, set[str]], passed: list[str], limit: int | None = None
) -> Verified:
    """Verifies the files that this rank reads: every ``ranks.size``-th. ``limit``: as of ``MemorySource``."""
    manifest_node = keepers.nearest_first([node for node, names in nodes.items() if {MANIFEST, MARKER} <= names])
    if not manifest_node:
        raise Damaged("it has no manifest")
    small = MemorySource(keepers, step, {MANIFEST: manifest_node[0], MARKER: manifest_node[0]}).small
    data = small(MANIFEST)
    if small(MARKER) != marker_of(data):
        raise Damaged(f"its {MARKER} marker and its {MANIFEST} do not match")
    manifest = parse_manifest(data)
    where, size, read, verified = dict[str, int](), 0, dict[tuple[str, int], memoryview](), set[tuple[str, int]]()
    for number, entry in enumerate(manifest.indexes):
        if number % ranks.size != ranks.rank:
            continue
        index = None
        for node in keepers.nearest_first([node for node, names in nodes.items() if entry.name in names]):
            try:
                index = parse_entry(MemorySource(keepers, step, {entry.name: node}).small(entry.name), entry)
                source = MemorySource(keepers, step, {index.file: node}, limit=limit)
                with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="memory") as pool:
                    # What arrives and what is verified take turns on the cores: both leave Python's lock to others.
                    list(pool.map(partial(_verify_piece, source, index), range(0, index.size, PIECE_BYTES)))
                where |= {entry.name: node, index.file: node}
                size += index.size
                read |= source.read
                verified |= {(index.file, place) for place in range(len(index.chunks))}
                break
            except Damaged as error:
                passed.append(f"{error} ({keepers.place} of node {keepers.names[node]})")
                index = None
        if index is None:
            raise Damaged(f"no node has a whole copy of '{entry.name}' and its data")
    return Verified(where, size, manifest, bytes_digest(data), read, verified)


def _verify_piece(source: MemorySource, index: RankIndex, offset: int) -> None:
    """Reads the piece at ``offset`` and compares its chunks with their digests. Raises ``Damaged``."""
    digest = chunk_digest(index.algorithm)
    for start in range(offset, min(offset + PIECE_BYTES, index.size), index.chunk_bytes):
        chunk = source.pread(index.file, min(index.chunk_bytes, index.size - start), start)
        if digest(chunk) != index.chunks[start // index.chunk_bytes]:
            raise Damaged(f"'{index.file}' does not have the digest it was written with at byte {start}")
