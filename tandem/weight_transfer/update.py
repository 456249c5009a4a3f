"""The rollout's side: read a published version, verify it whole, and only then hand it to the engine."""

import logging
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.runtime.calls import PeerDied
from tandem.runtime.coordination.store import Store
from tandem.types.errors import RunError
from tandem.types.sample import WeightVersion
from tandem.types.weights import TensorEntry, WeightManifest
from tandem.weight_transfer.copying import Threads, address_of, copy_and_digest
from tandem.weight_transfer.manifest import aligned
from tandem.weight_transfer.publication import current, describe
from tandem.weight_transfer.register import place
from tandem.weight_transfer.shared_memory import FOLDER, Segment, populate

logger = logging.getLogger(__name__)

Apply = Callable[[Sequence[tuple[str, Tensor]], WeightVersion], object]


@dataclass(frozen=True, slots=True)
class Weights:
    """One version, verified. ``tensors`` look into the reader's own memory and are good until its next ``read``."""

    version: WeightVersion
    digest: str
    size_bytes: int
    tensors: list[tuple[str, Tensor]]


class WeightReader:
    """Reads one version after another into private memory that stays warm between them."""

    def __init__(self, store: Store, threads: int = 2, folder: Path = FOLDER) -> None:
        self.store, self.folder = store, folder
        self._threads = Threads(threads)
        self._segments: dict[str, Segment] = {}
        self._staging: mmap.mmap | None = None

    def update(self, apply: Apply, version: WeightVersion | None = None) -> Weights:
        """Read ``version`` (``None``: the current one) and call ``apply(tensors, version)``, once, with all of it."""
        weights = self.read(version)
        apply(weights.tensors, weights.version)
        return weights

    def read(self, version: WeightVersion | None = None) -> Weights:
        """Copy every tensor out and verify the digest *of the copy*; a mismatch is read once more, from the manifest
        on.

        Raises ``RunError`` where nothing, or another version than ``version``, is published, and where a tensor's bytes
        are not what its manifest says twice; ``PeerDied`` where the segments went with the trainer's shim. Nothing has
        been handed on then.
        """
        wrong: TensorEntry | None = None
        for _ in range(2):
            manifest = self._manifest(version)
            wrong = self._copy(manifest)
            if wrong is None:
                return Weights(manifest.version, manifest.digest, manifest.size_bytes, self._tensors(manifest))
            logger.warning("tensor '%s' %s does not have its digest", wrong.name, describe(manifest.version))
        assert wrong is not None
        raise RunError(
            f"tensor '{wrong.name}' of weights {describe(manifest.version)} was read twice and does not have its digest "
            f"{wrong.digest}; the weights in shared memory are damaged"
        )

    def close(self) -> None:
        """Let go of the segments and the private memory."""
        self._threads.close()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._staging = None

    def _manifest(self, version: WeightVersion | None) -> WeightManifest:
        found = current(self.store)
        if found is None:
            raise RunError("no weights are published; the trainer registers them before the engine is updated")
        manifest = found[0]
        if version is not None and manifest.version != version:
            raise RunError(f"weights {describe(version)} were asked for and {describe(manifest.version)} are published")
        return manifest

    def _copy(self, manifest: WeightManifest) -> TensorEntry | None:
        """Fill the private memory; returns a tensor whose copy does not have its digest."""
        entries = manifest.tensors
        offsets = place([entry.size_bytes for entry in entries])
        self._open_segments({entry.segment for entry in entries})
        for entry in entries:
            if entry.offset_bytes + entry.size_bytes > self._segments[entry.segment].size_bytes:
                raise RunError(f"tensor '{entry.name}' of weights {describe(manifest.version)} lies outside its segment")
        private = address_of(memoryview(self._private(offsets[-1] + entries[-1].size_bytes if entries else 0)))
        shared = {name: address_of(segment.memory) for name, segment in self._segments.items()}

        def read(i: int) -> bool:
            entry = entries[i]
            source = shared[entry.segment] + entry.offset_bytes
            return copy_and_digest(private + offsets[i], source, entry.size_bytes, of_source=False) == entry.digest

        right = self._threads.map(read, range(len(entries)), [entry.size_bytes for entry in entries])
        return next((entry for entry, good in zip(entries, right, strict=True) if not good), None)

    def _tensors(self, manifest: WeightManifest) -> list[tuple[str, Tensor]]:
        assert self._staging is not None
        tensors = []
        for entry, at in zip(manifest.tensors, place([entry.size_bytes for entry in manifest.tensors]), strict=True):
            dtype: torch.dtype = getattr(torch, entry.dtype)
            count = entry.size_bytes // dtype.itemsize
            flat = torch.frombuffer(self._staging, dtype=dtype, count=count, offset=at) if count else torch.empty(0, dtype=dtype)
            tensors.append((entry.name, flat.view(entry.shape)))
        return tensors

    def _private(self, size_bytes: int) -> mmap.mmap:
        size_bytes = max(aligned(size_bytes), mmap.PAGESIZE)
        if self._staging is None or len(self._staging) < size_bytes:
            # An older, smaller one is freed with the last tensor that looks into it.
            self._staging = mmap.mmap(-1, size_bytes)
            populate(self._staging)
        return self._staging

    def _open_segments(self, names: set[str]) -> None:
        owners = {name.rsplit("-weights-", 1)[0] for name in names}
        for name in list(self._segments):
            # The other buffer of the same owner comes next; those of an owner that was replaced never come again.
            if name.rsplit("-weights-", 1)[0] not in owners:
                self._segments.pop(name).close()
        for name in names - self._segments.keys():
            try:
                segment = Segment.open(name, self.folder)
            except FileNotFoundError:
                text = f"the trainer's shim is gone: its shared memory {name} was removed before it was read"
                raise PeerDied("trainer", "update_weight", text) from None
            segment.touch()
            self._segments[name] = segment
