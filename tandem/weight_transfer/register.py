"""The trainer's side: its ranks write the converted weights to the free buffer, and the first rank publishes them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tandem.layout.shard_offsets import ShardOffsets
from tandem.runtime.collectives.agreement import vote
from tandem.runtime.collectives.communicator import CollectiveError, Communicator
from tandem.runtime.coordination.store import Guard, Store
from tandem.types.errors import RunError
from tandem.types.sample import WeightVersion
from tandem.types.weights import Layout, PartEntry, TensorEntry, WeightManifest
from tandem.weight_transfer.convert import ConvertedWeights
from tandem.weight_transfer.copying import Threads, address_of, copy_and_digest, digest_of, looks_equal
from tandem.weight_transfer.manifest import make_manifest
from tandem.weight_transfer.panels import DIGESTED_BYTES, PublishingKernels, look_equal, write_panels
from tandem.weight_transfer.publication import Replaceable, check_newer, describe, publish, replaceable
from tandem.weight_transfer.shared_memory import Contents, Segment, WeightBuffers, contents_of


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

    def publish(self, weights: ConvertedWeights, version: WeightVersion, guard: Guard | None = None) -> WeightManifest:
        """Copies and digests every part on its owner and publishes ``version``, all or nothing. Every rank calls it and returns the
        manifest.

        A part that the buffer holds already, from the version before the last, is not copied again: frozen weights are not even read, and others are
        compared with the digest of what was written there. Where the published version is registered again, because its memory was damaged, everything is
        copied.

        The buffer with the published version is not written to. Raises the same ``RunError`` on every rank if the tensors do not fit, a
        rank fails, ``version`` is not newer than the published one (the trainer has been replaced in the meantime), or ``guard`` does not
        hold, which rank 0 needs alone.
        """
        ranks, what = weights.ranks, f"the weights {describe(version)} were not published"

        def choose() -> tuple[int, list[int | str]]:
            replaced = self._published = replaceable(self.store, self._published)
            before = replaced[0] if replaced else None
            check_newer(version, None, before)
            published = before.tensors[0].segment if before and before.tensors else None
            chosen = self.buffers.other(published)
            if weights.size_bytes > chosen.size_bytes:
                raise RunError(f"they need {weights.size_bytes} bytes and the shared memory has {chosen.size_bytes}; their shapes have changed")
            held = chosen.contents if before is None or version != before.version else None
            chosen.contents = None
            return self.buffers.segments.index(chosen), _plain(held)

        (place, held), *_ = _together(ranks, what, choose if ranks.rank == 0 else lambda: None)
        segment = self.buffers.segments[place]
        written, known = self._written.pop(segment.name, ([], {}))
        digests = _together(ranks, what, lambda: self._write(segment, weights, known if held and written == held else {}))
        manifest = _manifest(weights, segment.name, digests, version)

        def move_on() -> None:
            segment.contents = contents_of(manifest)
            self._published = (manifest, publish(self.store, manifest, self._published, guard))

        _together(ranks, what, move_on if ranks.rank == 0 else lambda: None)
        self._written[segment.name] = _plain(contents_of(manifest)), dict(zip(_places(weights), digests[ranks.rank], strict=True))
        return manifest

    def _write(self, segment: Segment, weights: ConvertedWeights, known: Mapping["_Place", str]) -> list[str]:
        """Returns the digests of this rank's parts, in order. ``known``: of what the segment holds."""
        own, where = weights.own, _places(weights)
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

        return self._threads.map(write, range(len(own)), sizes)

    def close(self) -> None:
        """Ends the threads and releases the buffers; their owner removes them."""
        self._threads.close()
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
