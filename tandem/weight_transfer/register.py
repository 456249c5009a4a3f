"""The trainer's side: its ranks write the converted weights to the free buffer, and the first rank publishes them.

It may announce the version before, so that other pods read parts as soon as they are written (``announcement``).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tandem.layout.shard_offsets import ShardOffsets
from tandem.runtime.collectives.agreement import vote
from tandem.runtime.collectives.communicator import CollectiveError, Communicator
from tandem.runtime.coordination.store import Guard, Store
from tandem.types.dtypes import DTYPE_BYTES
from tandem.types.errors import RunError
from tandem.types.sample import WeightVersion
from tandem.types.weights import Layout, PartEntry, TensorEntry, WeightManifest
from tandem.weight_transfer.announcement import Announcement, Board, Place, announce, board_bytes, new_attempt, write_note
from tandem.weight_transfer.convert import ConvertedWeights, Part
from tandem.weight_transfer.copying import Threads, address_of, copy_and_digest, digest_of, looks_equal
from tandem.weight_transfer.manifest import make_manifest
from tandem.weight_transfer.panels import DIGESTED_BYTES, PublishingKernels, look_equal, write_panels
from tandem.weight_transfer.publication import Replaceable, check_newer, describe, publish, replaceable
from tandem.weight_transfer.shared_memory import Contents, Segment, WeightBuffers, contents_of

logger = logging.getLogger(__name__)


class WeightWriter:
    """Publishes one version after another in ``buffers``, which a shim owns and which outlive this process. Each of the trainer's ranks has
    a writer for the same buffers and ``store``; rank 0 reads and writes the store. ``kernels`` write matrices in panels, where the weights were converted
    so, and copy past the cache."""

    def __init__(self, buffers: WeightBuffers, store: Store, threads: int = 2, kernels: PublishingKernels | None = None) -> None:
        self.buffers, self.store, self._kernels = buffers, store, kernels
        self._threads = Threads(threads)
        self._touched: set[str] = set()
        self._published: Replaceable | None = None
        # What this process has written to each segment, by name, and in which place: (part, offset in the segment) -> digest.
        self._written: dict[str, tuple[list[int | str], dict[_Place, str]]] = {}
        # The shared memory in which this trainer's ranks mark parts of announced versions; rank 0 has made it.
        self._board: Segment | None = None

    def publish(self, weights: ConvertedWeights, version: WeightVersion, guard: Guard | None = None, *, announces: bool = False) -> WeightManifest:
        """Copies and digests every part on its owner and publishes ``version``, all or nothing. Every rank calls it and returns the
        manifest.

        A part that the buffer holds already, from the version before the last, is not copied again: frozen weights are not even read, and others are
        compared with the digest of what was written there. Where the published version is registered again, because its memory was damaged, everything is
        copied. ``announces``: other pods are told of the version before, and of each part when it is written, if the shared memory has room for a few bytes
        more.

        The buffer with the published version is not written to. Raises the same ``RunError`` on every rank if the tensors do not fit, a
        rank fails, ``version`` is not newer than the published one (the trainer has been replaced in the meantime), or ``guard`` does not
        hold, which rank 0 needs alone.
        """
        ranks, what = weights.ranks, f"the weights {describe(version)} were not published"

        def choose() -> tuple[int, list[int | str], list[str]]:
            replaced = self._published = replaceable(self.store, self._published)
            before = replaced[0] if replaced else None
            check_newer(version, None, before)
            published = before.tensors[0].segment if before and before.tensors else None
            chosen = self.buffers.other(published)
            if weights.size_bytes > chosen.size_bytes:
                raise RunError(f"they need {weights.size_bytes} bytes and the shared memory has {chosen.size_bytes}; their shapes have changed")
            held = chosen.contents if before is None or version != before.version else None
            write_note(chosen, None)
            chosen.contents = None
            return self.buffers.segments.index(chosen), _plain(held), self._announce(weights, version, chosen) if announces else []

        (place, held, told), *_ = _together(ranks, what, choose if ranks.rank == 0 else lambda: None)
        segment = self.buffers.segments[place]
        written, known = self._written.pop(segment.name, ([], {}))
        try:
            digests = _together(ranks, what, lambda: self._write(segment, weights, known if held and written == held else {}, self._marks(told)))
        except BaseException:
            write_note(segment, None)
            raise
        manifest = _manifest(weights, segment.name, digests, version)

        def move_on() -> None:
            segment.contents = contents_of(manifest)
            self._published = (manifest, publish(self.store, manifest, self._published, guard))

        _together(ranks, what, move_on if ranks.rank == 0 else lambda: None)
        self._written[segment.name] = _plain(contents_of(manifest)), dict(zip(_places(weights), digests[ranks.rank], strict=True))
        return manifest

    def _announce(self, weights: ConvertedWeights, version: WeightVersion, segment: Segment) -> list[str]:
        """Announces ``version``. Returns the attempt and the board; nothing if there is no memory for a board."""
        places, attempt = [Place(part.offset_bytes, size_bytes) for part, size_bytes in _announced_parts(weights).values()], new_attempt()
        needed = board_bytes(len(places))
        try:
            if self._board is None or self._board.size_bytes < needed:
                self._close_board()
                self._board = Segment.create(segment.name.split("-")[1], "board", needed, in_huge_pages=False)
        except RunError as error:
            logger.warning("weights %s are not announced: %s", describe(version), error)
            return []
        Board(self._board.memory, attempt).begin(places)
        announcement = Announcement(version, segment.name, weights.size_bytes, attempt, self._board.name)
        write_note(segment, announcement)
        announce(self.store, announcement)
        return [attempt, self._board.name]

    def _marks(self, told: Sequence[str]) -> Board | None:
        """Returns the board of the announcement ``told``, if there is one."""
        if not told:
            return None
        attempt, name = told
        if self._board is None or self._board.name != name:
            self._close_board()
            self._board = Segment.open(name, writable=True)
        return Board(self._board.memory, attempt)

    def _close_board(self) -> None:
        if self._board is not None:
            self._board.close()
        self._board = None

    def _write(self, segment: Segment, weights: ConvertedWeights, known: Mapping["_Place", str], board: Board | None) -> list[str]:
        """Returns the digests of this rank's parts, in order. ``known``: of what the segment holds. ``board``: of an announced version."""
        own, where = weights.own, _places(weights)
        index = {} if board is None else {key: at for at, key in enumerate(_announced_parts(weights))}
        places = [place.offset_bytes for place in where]
        sizes = [part.size_bytes for part in own]
        if segment.name not in self._touched:
            segment.touch(list(zip(places, sizes, strict=True)))
            self._touched.add(segment.name)
        base = address_of(segment.memory)

        def write(i: int) -> str:
            digest = known.get(where[i])
            if digest is not None and where[i].is_frozen:
                return digest
            source = own[i].read()
            if where[i].layout == "panels":
                assert self._kernels is not None
                if digest is not None and look_equal(self._kernels, source, base + places[i]) and write_panels(self._kernels, source, None) == digest:
                    return digest
                return write_panels(self._kernels, source, base + places[i])
            if digest is not None and looks_equal(base + places[i], source.data_ptr(), sizes[i]) and digest_of(source.data_ptr(), sizes[i]) == digest:
                return digest
            if self._kernels is None or sizes[i] < DIGESTED_BYTES:
                return copy_and_digest(base + places[i], source.data_ptr(), sizes[i], of_source=True)
            return self._kernels.copy_and_digest(base + places[i], source.data_ptr(), sizes[i])

        def write_and_mark(i: int) -> str:
            digest, key = write(i), (own[i].tensor, own[i].part)
            if board is not None and key in index:
                board.mark(index[key], digest)
            return digest

        return self._threads.map(write_and_mark, range(len(own)), sizes)

    def close(self) -> None:
        """Ends the threads and releases the buffers; their owner removes them."""
        self._threads.close()
        self._close_board()
        self.buffers.close()


def _plain(contents: Contents | None) -> list[int | str]:
    """Returns what a segment holds as ranks send it to each other; empty if that is not known."""
    return [] if contents is None else [*contents.version, contents.digest]


class _Place(NamedTuple):
    """What a part is, and where and how it is in a segment. ``is_frozen``: as of its shard; what was written before it was frozen may differ."""

    name: str
    dtype: str
    offsets: ShardOffsets
    offset_bytes: int
    layout: Layout
    is_frozen: bool


def _places(weights: ConvertedWeights) -> list[_Place]:
    """Returns those of this rank's parts, in order."""
    parts = [(weights.tensors[own.tensor], weights.tensors[own.tensor].parts[own.part], own.shard.is_frozen) for own in weights.own]
    return [_Place(tensor.name, tensor.dtype, part.offsets, part.offset_bytes, tensor.layout, is_frozen) for tensor, part, is_frozen in parts]


def _announced_parts(weights: ConvertedWeights) -> dict[tuple[int, int], tuple[Part, int]]:
    """Returns the parts of all ranks that have bytes, by their tensor and their number in it, in the order of a board: each with its bytes."""
    return {
        (i, j): (part, part.offsets.numel * DTYPE_BYTES[tensor.dtype])
        for i, tensor in enumerate(weights.tensors)
        for j, part in enumerate(tensor.parts)
        if part.offsets.numel
    }


def _together(ranks: Communicator, what: str, work: Callable[[], Any]) -> list[Any]:
    """Returns the results of ``work`` on every rank. Raises the same ``RunError`` on every rank if it fails on one."""
    if ranks.size == 1:
        return [work()]
    value, trouble = None, None
    try:
        value = work()
    except CollectiveError:
        raise
    except (RunError, OSError, RuntimeError, MemoryError) as error:
        trouble = str(error).splitlines()[0] if str(error) else type(error).__name__
    return vote(ranks, what, trouble, value)


def _manifest(weights: ConvertedWeights, segment: str, digests: Sequence[Sequence[str]], version: WeightVersion) -> WeightManifest:
    left = [iter(own) for own in digests]
    return make_manifest(version, [
        TensorEntry(
            tensor.name, tensor.dtype, tensor.shape, segment, tensor.offset_bytes, tensor.size_bytes,
            tuple(PartEntry(part.owner, part.offsets.start, part.offsets.stop, next(left[part.owner])) for part in tensor.parts),
            tensor.layout,
        )
        for tensor in weights.tensors
    ])  # fmt: skip
