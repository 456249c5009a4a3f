"""The rollout's side: reads a published version, verifies all of it, and only then passes it to the engine."""

import logging
import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.layout.shard_offsets import ShardOffsets
from tandem.runtime.coordination.store import Store
from tandem.types.dtypes import DTYPE_BYTES
from tandem.types.errors import DamagedWeights, RunError
from tandem.types.sample import WeightVersion
from tandem.types.weights import Layout, TensorEntry, Updated, WeightManifest
from tandem.weight_transfer import elementwise
from tandem.weight_transfer.copying import Threads, address_of
from tandem.weight_transfer.delta import Delta, ReadDeltas
from tandem.weight_transfer.manifest import aligned, offsets_of, place
from tandem.weight_transfer.parts import PartCopy, Wanted, is_row_major, part_copies, wants_all
from tandem.weight_transfer.publication import current, describe
from tandem.weight_transfer.shared_memory import OpenSegments, populate
from tandem.weight_transfer.shared_weights import SharedReader, SharedWeights

logger = logging.getLogger(__name__)

Apply = Callable[[Sequence[tuple[str, Tensor]], WeightVersion], object]


@dataclass(frozen=True, slots=True)
class Weights:
    """One version, verified by ``read``. ``tensors`` are views of the reader's own memory, valid until its next ``read``, or after ``view`` of the shared one;
    each contains what the reader needs of it. ``rereads`` and ``revision``: as in ``Updated``. ``changes``: the tensors that are not as they were when the
    reader was last told that its tensors were applied, by name, with the indices of the elements that may differ (int64, of the flat tensor); ``None`` for
    those: any, or not known."""

    version: WeightVersion
    digest: str
    size_bytes: int
    tensors: list[tuple[str, Tensor]]
    rereads: tuple[str, ...] = ()
    revision: int = 0
    changes: Mapping[str, Tensor | None] = field(default_factory=dict)


class WeightReader:
    """Reads one version after another into private memory that is kept between them. ``wanted``: the slices it needs of each tensor. ``finds_elements``:
    whether ``Weights.changes`` has the elements that an element-wise delta changes, or their tensors alone."""

    def __init__(self, store: Store, threads: int = 2, wanted: Wanted = wants_all, *, finds_elements: bool = False) -> None:
        self.store, self._wanted, self._finds_elements = store, wanted, finds_elements
        self._threads = Threads(threads)
        self._segments = OpenSegments()
        self._staging: mmap.mmap | None = None
        # The digests of the verified parts that the private memory holds, as long as its tensors and their parts stay the same.
        self._layout: list[tuple[str, str, ShardOffsets, tuple[ShardOffsets, ...]]] = []
        self._held: dict[tuple[str, ShardOffsets], str] = {}
        self._deltas = ReadDeltas(store)
        # Of what ``Weights.changes`` is made.
        self._changes: dict[str, list[Tensor] | None] = {}

    def was_applied(self) -> None:
        """Called when the tensors of the last ``read`` were applied."""
        self._changes.clear()

    def update(self, apply: Apply, version: WeightVersion | None = None) -> Updated:
        """Reads ``version`` (``None``: the current one) and calls ``apply(tensors, version)`` once with all of it."""
        weights = self.read(version)
        apply(weights.tensors, weights.version)
        return Updated(weights.version, weights.size_bytes, weights.rereads, weights.revision)

    def read(self, version: WeightVersion | None = None) -> Weights:
        """Copies every tensor and verifies the digest of the copy; after a mismatch everything is read once more, from the manifest on. Parts that the
        version read before had too, by their digests, are here already, and are not copied. Those that an element-wise delta makes of such parts are made in
        their place, and compared with their digests all the same.

        Raises ``DamagedWeights`` if a tensor does not match its manifest twice; ``RunError`` if nothing, or another version than
        ``version``, is published; ``PeerDied`` if the segments were removed with the trainer's shim. Nothing has been applied then.
        """
        damaged: tuple[str, ...] = ()
        for _ in range(2):
            (manifest, revision), before = self._manifest(version), damaged
            chosen = [(e, offsets) for e in manifest.tensors if (offsets := self._wanted(e.name, e.shape)) is not None]
            tensors, damaged = self._copy(manifest, chosen)
            if not damaged:
                size_bytes = sum(tensor.nbytes for _, tensor in tensors)
                return Weights(manifest.version, manifest.digest, size_bytes, tensors, before, revision, self._together())
            logger.warning("tensor '%s' %s does not have its digest", damaged[0], describe(manifest.version))
        digests = next([part.digest for part in entry.parts] for entry in manifest.tensors if entry.name == damaged[0])
        raise DamagedWeights(
            f"tensor '{damaged[0]}' of weights {describe(manifest.version)} was read twice and does not have its digest "
            f"{', '.join(digests)}; the weights in shared memory are damaged"
        )

    def view(self, version: WeightVersion) -> Weights:
        """Returns ``version`` as views of the shared memory itself, of which nothing is copied and no digest compared, for a reader whose caller does that
        when all of it has been used (``PublishedVerifier``). Valid until the next version but one is written.

        Slices whose parts are not rows one behind the other, or are in panels, are put together in private memory. Raises the errors of ``read`` but
        ``DamagedWeights``.
        """
        manifest, revision = self._manifest(version)
        chosen = [(entry, offsets) for entry in manifest.tensors if (offsets := self._wanted(entry.name, entry.shape)) is not None]
        opened = self._segments.of(manifest)
        tensors = []
        for entry, offsets in chosen:
            dtype: torch.dtype = getattr(torch, entry.dtype)
            if is_row_major(entry):
                memory, count = opened[entry.segment].memory, math.prod(entry.shape)
                whole = torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.offset_bytes) if count else torch.empty(0, dtype=dtype)
                tensors.append((entry.name, whole.view(entry.shape)[offsets.slices]))
            else:
                shared, slices = address_of(opened[entry.segment].memory), torch.empty(offsets.shape, dtype=dtype)
                for copy in part_copies(entry, offsets):
                    copy.read(shared, slices)
                tensors.append((entry.name, slices))
        return Weights(manifest.version, manifest.digest, sum(tensor.nbytes for _, tensor in tensors), tensors, revision=revision)

    def share(self, version: WeightVersion, layout: Layout, *, verifies: bool, rank: tuple[int, int] = (0, 1)) -> SharedWeights | None:
        """Returns ``version`` in the ``layout`` of the engine's kernels, where it was published, for a ``rank`` of so many; see ``SharedReader.take``. The
        private memory is freed."""
        shared = SharedReader(self.store, self._threads, self._segments, self._wanted, rank).take(version, layout, verifies=verifies)
        if shared is not None:
            self._staging, self._layout, self._held = None, [], {}
        return shared

    def close(self) -> None:
        """Releases the segments and the private memory."""
        self._threads.close()
        self._segments.close()
        self._deltas.close()
        self._staging = None

    def _manifest(self, version: WeightVersion | None) -> tuple[WeightManifest, int]:
        published = current(self.store)
        if published is None:
            raise RunError("no weights are published; the trainer registers them before the engine is updated")
        manifest = published[0]
        if version is not None and manifest.version != version:
            raise RunError(f"weights {describe(version)} were requested, but {describe(manifest.version)} are published")
        return published

    def _copy(
        self, manifest: WeightManifest, chosen: Sequence[tuple[TensorEntry, ShardOffsets]]
    ) -> tuple[list[tuple[str, Tensor]], tuple[str, ...]]:
        """Fills the private memory with the slices in ``chosen``; returns them, and the names of tensors whose copy does not match its
        digests."""
        copies = [(i, copy) for i, (entry, offsets) in enumerate(chosen) for copy in part_copies(entry, offsets)]
        opened = self._segments.of(manifest, [(copy.entry.segment, copy.offset_bytes, copy.size_bytes) for _, copy in copies])
        tensors = self._tensors(chosen)
        shared = {name: address_of(segment.memory) for name, segment in opened.items()}

        def read(at: tuple[int, PartCopy]) -> bool:
            i, copy = at
            return copy.read(shared[copy.entry.segment], tensors[i][1])

        missing = [(i, copy) for i, copy in copies if self._held.get(_key(copy)) != copy.part.digest]
        held = {_key(copy): self._held.pop(_key(copy), "") for _, copy in missing}
        delta = self._deltas.to(manifest) if any(held.values()) else None
        if delta is not None:

            def make(at: tuple[int, PartCopy]) -> _Made:
                return _make(delta, at[1], held[_key(at[1])], tensors[at[0]][1], finds_elements=self._finds_elements)

            made = self._threads.map(make, missing, [copy.size_bytes for _, copy in missing])
            for (_, copy), (is_made, where) in zip(missing, made, strict=True):
                self._note(copy, where)
                if is_made:
                    self._held[_key(copy)] = copy.part.digest
            missing = [at for at, (is_made, _) in zip(missing, made, strict=True) if not is_made]
        else:
            for _, copy in missing:
                self._note(copy, None)
        right = self._threads.map(read, missing, [copy.size_bytes for _, copy in missing])
        self._held |= {_key(copy): copy.part.digest for (_, copy), good in zip(missing, right, strict=True) if good}
        wrong = dict.fromkeys(copy.entry.name for (_, copy), good in zip(missing, right, strict=True) if not good)
        return tensors, tuple(wrong)

    def _note(self, copy: PartCopy, where: Tensor | None) -> None:
        """Notes the elements of a tensor that have changed with the part of ``copy``; ``None``: any of it."""
        noted = self._changes.setdefault(copy.entry.name, [])
        if where is None or noted is None:
            self._changes[copy.entry.name] = None
        else:
            noted.append(where)

    def _together(self) -> dict[str, Tensor | None]:
        return {name: None if found is None else torch.cat(found).unique() if len(found) > 1 else found[0] for name, found in self._changes.items()}

    def _tensors(self, chosen: Sequence[tuple[TensorEntry, ShardOffsets]]) -> list[tuple[str, Tensor]]:
        """Returns views of the private memory with the names and shapes of ``chosen``."""
        shapes = [offsets.shape for _, offsets in chosen]
        counts = list(map(math.prod, shapes))
        sizes = [count * DTYPE_BYTES[entry.dtype] for count, (entry, _) in zip(counts, chosen, strict=True)]
        offsets = place(sizes)
        staging = self._private(offsets[-1] + sizes[-1] if chosen else 0)
        layout = [(entry.name, entry.dtype, wanted, tuple(map(offsets_of, entry.parts))) for entry, wanted in chosen]
        if layout != self._layout:
            self._layout, self._held = layout, {}
        tensors = []
        for (entry, _), shape, count, at in zip(chosen, shapes, counts, offsets, strict=True):
            dtype: torch.dtype = getattr(torch, entry.dtype)
            flat = torch.frombuffer(staging, dtype=dtype, count=count, offset=at) if count else torch.empty(0, dtype=dtype)
            tensors.append((entry.name, flat.view(shape)))
        return tensors

    def _private(self, size_bytes: int) -> mmap.mmap:
        size_bytes = max(aligned(size_bytes), mmap.PAGESIZE)
        if self._staging is None or len(self._staging) < size_bytes:
            # A previous, smaller one is freed with the last tensor that is a view of it.
            self._staging, self._held = mmap.mmap(-1, size_bytes), {}
            populate(self._staging)
        return self._staging


class _Made(NamedTuple):
    """Whether a delta made a part, and the indices of its elements in the flat tensor that may have changed; ``None``: any, or not known."""

    is_made: bool
    where: Tensor | None = None


def _make(delta: Delta, copy: PartCopy, held: str, out: Tensor, *, finds_elements: bool) -> _Made:
    """Makes the part of ``copy`` from the one with the digest ``held`` in its place of ``out``, if the delta can."""
    part = delta.parts.get((copy.part.digest, copy.size_bytes))
    # What is published in panels is not in the private memory as it was published.
    if part is None or part.base != held or copy.to is None or copy.entry.layout == "panels":
        return _Made(False)
    at = out.data_ptr() + copy.to * out.element_size()
    try:
        delta.apply(part, at, at)
        if not finds_elements:
            return _Made(True)
        positions = elementwise.changed_positions(delta.encoding(part), part.part_bytes, part.item_bytes)
    except ValueError as error:
        logger.warning("tensor '%s' is read whole: %s", copy.entry.name, error)
        return _Made(False)
    return _Made(True, torch.from_numpy(positions) + copy.to)


def _key(copy: PartCopy) -> tuple[str, ShardOffsets]:
    """Returns what a part is called among those of a layout."""
    return copy.entry.name, offsets_of(copy.part)
