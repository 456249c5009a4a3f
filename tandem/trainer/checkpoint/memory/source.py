"""Finds the newest whole checkpoint in the memory of the nodes, and reads it."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tandem.runtime.collectives.agreement import gather_values
from tandem.runtime.collectives.communicator import Communicator
from tandem.runtime.rpc.calls import CallError
from tandem.storage.digests import bytes_digest, chunk_digest
from tandem.trainer.checkpoint.format.commit import MARKER
from tandem.trainer.checkpoint.format.manifest import MANIFEST, Damaged, Manifest, marker_of, parse_entry, parse_manifest
from tandem.trainer.checkpoint.format.rank_file import RankIndex
from tandem.trainer.checkpoint.memory.keepers import AT_ONCE, PIECE_BYTES, Keepers
from tandem.types import UserError
from tandem.types.wire import Buffer


@dataclass(frozen=True, slots=True)
class MemorySource:
    """The files of the checkpoint of ``step``, each in the memory of the node in ``where``. ``read``: the pieces that this rank has read, by file and offset,
    so that they are sent once; ``verified``: the chunks of them that have their digests."""

    keepers: Keepers
    step: int
    where: Mapping[str, int]
    read: dict[tuple[str, int], memoryview] = field(default_factory=dict)
    verified: set[tuple[str, int]] = field(default_factory=set)

    def small(self, name: str) -> bytes:
        """Returns a whole file. Raises ``Damaged`` if it cannot be read."""
        return bytes(self._read(name))

    def pread(self, name: str, size: int, offset: int) -> memoryview:
        """Returns ``size`` bytes of a file at ``offset``, which one piece holds. Raises ``Damaged`` if they cannot be read."""
        first = offset // PIECE_BYTES * PIECE_BYTES
        piece = self.read.get((name, first))
        if piece is None:
            piece = self.read[name, first] = memoryview(self._read(name, first, PIECE_BYTES))
        return piece[offset - first : offset - first + size]

    def _read(self, name: str, offset: int = 0, size: int | None = None) -> Buffer:
        try:
            return self.keepers.read(self.where[name], self.step, name, offset, size)
        except (CallError, UserError) as error:
            raise Damaged(f"'{name}' cannot be read from the memory of node {self.where[name]}: {error}") from None


@dataclass(frozen=True, slots=True)
class InMemory:
    """A checkpoint in which every byte is as written. ``digest``: of its manifest."""

    step: int
    manifest: Manifest
    digest: str
    source: MemorySource
    size_bytes: int


class _Verified(NamedTuple):
    """The files that a rank has verified: the node of each, their bytes and the pieces that were ``read``; the manifest and its digest."""

    where: dict[str, int]
    size_bytes: int
    manifest: Manifest
    digest: str
    read: dict[tuple[str, int], memoryview]
    verified: set[tuple[str, int]]


def newest_in_memory(
    keepers: Keepers, ranks: Communicator, at_least: int, passed_over: Callable[[str], None] = lambda why: None
) -> InMemory | None:
    """Returns the newest whole checkpoint, of step ``at_least`` or later, that all files of are in the memory of some node; ``None`` if there is none.

    The ranks share the reading and return the same checkpoint. A damaged copy of a file is passed over for the one of the next node, and a checkpoint without
    a whole copy of some file for an older one; ``passed_over`` is called with the reason on every rank."""
    [held, *_] = gather_values(ranks, [[step, list(nodes.items())] for step, nodes in sorted(keepers.held().items())], "checkpoints in memory")
    for step, nodes in reversed(held):
        if step < at_least:
            return None
        found, trouble, passed = None, None, list[str]()
        try:
            found = _verified(keepers, ranks, step, {int(node): set(names) for node, names in nodes}, passed)
        except Damaged as error:
            trouble = str(error)
        every = gather_values(ranks, [trouble, passed, found and [found.where, found.size_bytes]], f"the checkpoint of step {step} in memory")
        for reason in [reason for _, reasons, _ in every for reason in reasons]:
            passed_over(f"a copy of the checkpoint of step {step} is passed over: {reason}")
        troubles = [reason for reason, _, _ in every if reason]
        if found is None or troubles:
            passed_over(f"the checkpoint of step {step} in memory is skipped: {troubles[0]}")
            continue
        where = {name: node for _, _, (own, _) in every for name, node in own.items()}
        source = MemorySource(keepers, step, where, found.read, found.verified)
        return InMemory(step, found.manifest, found.digest, source, sum(size for _, _, (_, size) in every))
    return None


def _verified(
    keepers: Keepers, ranks: Communicator, step: int, nodes: Mapping[int, set[str]], passed: list[str]
) -> _Verified:
    """Verifies the files that this rank reads: every ``ranks.size``-th."""
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
                source = MemorySource(keepers, step, {index.file: node})
                with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="memory") as pool:
                    # What arrives and what is verified take turns on the cores: both leave Python's lock to others.
                    list(pool.map(partial(_verify_piece, source, index), range(0, index.size, PIECE_BYTES)))
                where |= {entry.name: node, index.file: node}
                size += index.size
                read |= source.read
                verified |= {(index.file, place) for place in range(len(index.chunks))}
                break
            except Damaged as error:
                passed.append(f"{error} (memory of node {node})")
                index = None
        if index is None:
            raise Damaged(f"no node has a whole copy of '{entry.name}' and its data")
    return _Verified(where, size, manifest, bytes_digest(data), read, verified)


def _verify_piece(source: MemorySource, index: RankIndex, offset: int) -> None:
    """Reads the piece at ``offset`` and compares its chunks with their digests. Raises ``Damaged``."""
    digest = chunk_digest(index.algorithm)
    for start in range(offset, min(offset + PIECE_BYTES, index.size), index.chunk_bytes):
        chunk = source.pread(index.file, min(index.chunk_bytes, index.size - start), start)
        if digest(chunk) != index.chunks[start // index.chunk_bytes]:
            raise Damaged(f"'{index.file}' does not have the digest it was written with at byte {start}")
