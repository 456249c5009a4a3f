"""Compares the published weights in shared memory with their digests, once for all engines of a host that have taken them. No torch.

Engines that share a host need not each verify a copy of their own: they take the weights straight out of the shared memory, and then all of it is verified
once, by the process that asked them to. What was damaged when an engine took it is still damaged then, and what has stayed published has not been written to in
between. Until the comparison has ended no engine says that it holds the version.
"""

from collections.abc import Collection, Mapping

from tandem.runtime.coordination.store import Store
from tandem.types.dtypes import DTYPE_BYTES
from tandem.types.errors import DamagedWeights, RunError
from tandem.types.sample import WeightVersion
from tandem.types.weights import WeightManifest
from tandem.weight_transfer.copying import Threads, address_of, digest_of
from tandem.weight_transfer.manifest import offsets_of, part_offsets
from tandem.weight_transfer.publication import Replaceable, current, describe, replaceable
from tandem.weight_transfer.shared_memory import OpenSegments, Segment, contents_of


def damaged_parts(manifest: WeightManifest, opened: Mapping[str, Segment], threads: Threads, rank: tuple[int, int] = (0, 1)) -> list[tuple[str, str]]:
    """Reads every part of ``manifest`` in the segments ``opened``, or those that fall to a ``rank`` of so many. Returns those that do not have their digests:
    the name of the tensor, and the digest."""
    places = [
        (entry.name, address_of(opened[entry.segment].memory) + offset, offsets_of(part).numel * DTYPE_BYTES[entry.dtype], part.digest)
        for entry in manifest.tensors
        for part, offset in zip(entry.parts, part_offsets(entry), strict=True)
    ]
    # By size, so that every rank reads as much.
    places = sorted(places, key=lambda place: -place[2])[rank[0] :: rank[1]] if rank[1] > 1 else places
    right = threads.map(lambda place: digest_of(place[1], place[2]) == place[3], places, [size_bytes for _, _, size_bytes, _ in places])
    return [(name, digest) for (name, _, _, digest), is_right in zip(places, right, strict=True) if not is_right]


class PublishedVerifier:
    """Verifies one version after another of those that are published in ``store``, on ``threads`` threads."""

    def __init__(self, store: Store, threads: int = 2) -> None:
        self._store = store
        self._threads = Threads(threads)
        self._segments = OpenSegments()

    def verify(self, version: WeightVersion, revisions: Collection[int]) -> int:
        """Reads every part of ``version`` and returns their bytes. ``revisions``: of the publications that engines took.

        Raises ``DamagedWeights`` with the name of a tensor that does not have its digest, and ``RunError`` if the weights were published again since an engine
        took them: the memory that it took them from may have been written to, and may hold them undamaged by now.
        """
        known = current(self._store)
        manifest, opened = self._published(version, revisions, known)
        damaged = damaged_parts(manifest, opened, self._threads)
        self._published(version, revisions, replaceable(self._store, known))
        for name, digest in damaged:
            raise DamagedWeights(f"tensor '{name}' of weights {describe(version)} does not have its digest {digest}; the weights in shared memory are damaged")
        return manifest.size_bytes

    def _published(
        self, version: WeightVersion, revisions: Collection[int], published: Replaceable | None
    ) -> tuple[WeightManifest, dict[str, Segment]]:
        manifest, revision = published or (None, 0)
        if manifest is not None and manifest.version == version and set(revisions) == {revision}:
            opened = self._segments.of(manifest)
            if all(segment.contents == contents_of(manifest) for segment in opened.values()):
                return manifest, opened
        raise RunError(f"weights {describe(version)} were published again or replaced while engines took them; update the engines again")

    def close(self) -> None:
        self._threads.close()
        self._segments.close()
